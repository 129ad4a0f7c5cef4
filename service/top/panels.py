"""What the view shows, as text with styles for a given width: pure functions of readings and figures."""

from __future__ import annotations

from rich.text import Text

from pageturner.service.client import BlockPoolMap, RequestState
from pageturner.service.core.outputs import SchedulerStats
from pageturner.service.engine.api import EngineHealth
from pageturner.service.policy_host.reports import PoliciesInfo, PolicyInfo
from pageturner.service.top import block_map
from pageturner.service.top.figures import Figures, Quantiles
from pageturner.service.top.readings import Away, Reading
from pageturner.service.top.styles import (
    HEALTH_STYLES,
    STATE_STYLES,
    USE_NAMES,
    USE_STYLES,
    Colouring,
    owner_style,
)
from pageturner.service.top.text import Glyphs, count, course_line, duration, rate, share

STALE_SECONDS = 2.0
"""What is older is told with its age."""


def headline(target: str, reading: Reading | None, away: Away | None, is_held: bool, glyphs: Glyphs) -> Text:
    """Who serves, and whether it does. away: since it was last met."""
    text = Text(no_wrap=True, overflow="ellipsis")
    dot = f" {glyphs.dot} "
    if away is not None:
        text.append("AWAY", "bold #e0637a")
    elif reading is not None:
        health = reading.activity.health
        text.append(health.value.upper(), HEALTH_STYLES[health])
    else:
        text.append("asking ...", "dim")
    if reading is not None:
        text.append(f"{dot}{reading.server.model_name}", "bold")
    text.append(f" at {target}")
    if is_held:
        text.append(f"{dot}HELD", "reverse")
    if away is not None:
        text.append(f"{dot}{' '.join(away.reason.split())}", "#e0637a")
    elif reading is not None:
        up = duration(reading.activity.uptime_seconds, glyphs)
        text.append(f"{dot}up {up}{dot}{reading.server.device}{dot}{reading.server.version}", "dim")
    return text


def notice(reading: Reading | None, glyphs: Glyphs) -> Text:
    """What an operator should know at once; empty where all is well."""
    if reading is None:
        return Text()
    told = [reading.activity.health_reason] if reading.activity.health_reason else []
    age = max(reading.requests.age_seconds, reading.blocks.age_seconds)
    if reading.activity.health is EngineHealth.STALLED or age > STALE_SECONDS:
        told.append(
            f"the step under way does not end: requests and blocks are of {duration(age, glyphs)} ago"
        )
    for policy in reading.policies.axes:
        if policy.asking_seconds > STALE_SECONDS:
            told.append(
                f"the {policy.axis} policy {policy.name} has not answered for "
                f"{duration(policy.asking_seconds, glyphs)}"
            )
        if policy.is_quarantined:
            why = f": {policy.quarantine_reason}" if policy.quarantine_reason else ""
            told.append(f"the {policy.axis} policy {policy.name} is quarantined{why}")
    return Text("; ".join(told), "#e0b83c", overflow="ellipsis")


def _tiers(load: SchedulerStats, glyphs: Glyphs) -> list[tuple[str, str, str]]:
    """Where evicted blocks live on: how full the host is of them, what is on disk, what failed."""
    told = []
    if load.num_host_blocks_cached:
        told.append(("host cache", share(load.num_host_blocks_cached, load.num_host_blocks, glyphs), ""))
    if load.num_disk_blocks_cached:
        told.append(("disk cache", f"{count(load.num_disk_blocks_cached)} blocks", ""))
    if failed := load.num_disk_reads_failed_total + load.num_disk_writes_dropped_total:
        told.append(("disk faults", count(failed), "#e0637a"))
    return told


def figures_panel(reading: Reading, figures: Figures, width: int, glyphs: Glyphs) -> Text:
    """Load, speed, latencies and memory: pairs of a name and its figure, as many a line as fit."""
    load = reading.load
    waiting, swapped = load.num_waiting - load.num_swapped, load.num_swapped
    used, blocks = load.num_blocks_used, load.num_blocks
    refused = figures.refusals_per_second
    groups: list[list[tuple[str, str, str]]] = [
        [
            ("running", count(load.num_running), STATE_STYLES[RequestState.RUNNING]),
            ("waiting", count(waiting), STATE_STYLES[RequestState.WAITING] if waiting else ""),
            ("swapped", count(swapped), STATE_STYLES[RequestState.SWAPPED] if swapped else ""),
            ("requests/s", rate(figures.requests_per_second, glyphs), ""),
            ("refused/s", rate(refused, glyphs), "#e0637a" if refused else ""),
        ],
        [
            ("output tokens/s", rate(figures.output_tokens_per_second, glyphs), "bold"),
            ("prompt tokens/s", rate(figures.prompt_tokens_per_second, glyphs), ""),
            ("first token", _quantiles(figures.time_to_first_token, glyphs), ""),
            ("between tokens", _quantiles(figures.inter_token_latency, glyphs), ""),
        ],
        [
            ("KV held", share(used, blocks, glyphs), ""),
            ("cached", share(load.num_blocks_evictable, blocks, glyphs), ""),
            ("free", share(load.num_blocks_free, blocks, glyphs), ""),
            ("host KV", share(load.num_host_blocks_used, load.num_host_blocks, glyphs), ""),
            *_tiers(load, glyphs),
            ("prefix hits", _percent(figures.prefix_hit_share, glyphs), ""),
            ("preemptions/s", rate(figures.preemptions_per_second, glyphs), ""),
        ],
    ]
    if figures.accepted_draft_share is not None:  # a server that makes none has no line of them
        groups[1].append(("guesses right", _percent(figures.accepted_draft_share, glyphs), ""))
    lines: list[Text] = []
    for group in groups:
        line = Text(no_wrap=True)
        for name, value, style in group:
            pair = Text.assemble((f"{name} ", "dim"), (value, style))
            if line and line.cell_len + 3 + pair.cell_len > width:
                lines.append(line)
                line = Text(no_wrap=True)
            line.append("   " if line else "")
            line.append_text(pair)
        lines.append(line)
    return Text("\n").join(lines)


def course_panel(figures: Figures, width: int, glyphs: Glyphs) -> Text:
    """Output tokens a second over the last readings; empty before there is any."""
    name = "output "
    line = course_line(figures.course, width - len(name), glyphs)
    return Text.assemble((name, "dim"), (line, "#2fb9a5")) if line else Text()


def _quantiles(quantiles: Quantiles, glyphs: Glyphs) -> str:
    if quantiles.median is None:
        return glyphs.none
    return f"{duration(quantiles.median, glyphs)} (p95 {duration(quantiles.p95, glyphs)})"


def _percent(part: float | None, glyphs: Glyphs) -> str:
    return glyphs.none if part is None else f"{100 * part:.0f} %"


def blocks_title(blocks: BlockPoolMap, colouring: Colouring, size: int) -> str:
    """How many there are, and what a cell stands for."""
    cell = "a cell is a block" if size == 1 else f"a cell is {size} blocks"
    return f"Blocks: {len(blocks.uses):,}, {cell}, coloured by {colouring}"


def blocks_legend(blocks: BlockPoolMap, glyphs: Glyphs) -> Text:
    """Each use with its sign and number."""
    legend = Text(no_wrap=True, overflow="ellipsis")
    for use, number in block_map.counts(blocks).items():
        legend.append("   " if legend else "")
        legend.append(glyphs.uses[use], USE_STYLES[use])
        legend.append(f" {USE_NAMES[use]} ", "dim")
        legend.append(count(number))
    return legend


def blocks_panel(
    blocks: BlockPoolMap, width: int, height: int, colouring: Colouring, glyphs: Glyphs
) -> tuple[int, Text]:
    """Blocks of a cell, and the map: the sign says the use, the colour the use or the owner."""
    size, found = block_map.cells(blocks, width * height)
    text = Text(no_wrap=True)
    for start in range(0, len(found), width):
        if start:
            text.append("\n")
        for cell in found[start : start + width]:
            style = USE_STYLES[cell.use]
            if colouring == "owner" and cell.owner is not None:
                style = owner_style(cell.owner)
            text.append(glyphs.uses[cell.use], style)
    return size, text


def policies_panel(policies: PoliciesInfo, glyphs: Glyphs) -> Text:
    """The policy of each axis, with what is remarkable of it."""
    text = Text(overflow="ellipsis", no_wrap=True)
    for policy in policies.axes:
        text.append(f" {glyphs.dot} " if text else "")
        text.append(f"{policy.axis} ", "dim")
        text.append(policy.name, "#e0637a" if policy.is_quarantined else "")
        text.append(_remark(policy), "#e0b83c")
    return text


def _remark(policy: PolicyInfo) -> str:
    told = []
    if policy.is_quarantined:
        told.append("quarantined")
    elif policy.num_faults:
        told.append(f"{policy.num_faults} faults")
    if policy.shadow is not None:
        told.append(
            f"shadow {policy.shadow.name}: {policy.shadow.num_disagreements}/{policy.shadow.num_compared}"
        )
    return f" ({', '.join(told)})" if told else ""
