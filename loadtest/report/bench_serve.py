"""The same figures under the names, and with the meanings, of `vllm bench serve --save-result`.

There times count from the sending of a request, here from when it was due: they differ by the send lag. TPOT
leaves out answers of one token; percentiles are linear between two samples; tokens and latencies are those of
requests that ended well. max_concurrent_requests is of whole seconds, as there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from pageturner.loadtest.client import Outcome, RequestRecord
from pageturner.loadtest.statistics import RunSummary, percentile

_PERCENTILES = (50, 90, 95, 99)


def bench_serve_fields(records: Sequence[RequestRecord], summary: RunSummary) -> dict[str, Any]:
    """For the top level of a JSON document. Milliseconds where the name says ms, seconds elsewhere."""
    ok = [record for record in records if record.outcome is Outcome.OK and not record.is_slow_reader]
    fields: dict[str, Any] = {
        "duration": summary.duration_seconds,
        "completed": summary.num_ok,
        "failed": summary.num_requests - summary.num_ok,
        "total_input_tokens": summary.num_prompt_tokens,
        "total_output_tokens": summary.num_output_tokens,
        "request_throughput": summary.requests_per_second,
        "request_goodput": summary.good_requests_per_second if summary.goodput.objectives.limits else None,
        "output_throughput": summary.output_tokens_per_second,
        "total_token_throughput": summary.total_tokens_per_second,
        "max_concurrent_requests": _most_in_a_second(ok),
    }
    fields |= _of_metric("ttft", (record.time_to_first_token for record in ok))
    fields |= _of_metric("tpot", (record.time_per_output_token for record in ok))
    fields |= _of_metric("itl", (gap for record in ok for gap in record.inter_token_latencies))
    fields |= _of_metric("e2el", (record.last_token for record in ok))
    return fields


def _of_metric(name: str, samples: Iterable[float | None]) -> dict[str, float]:
    milliseconds = sorted(1e3 * seconds for seconds in samples if seconds is not None)
    if not milliseconds:
        return {}
    mean = math.fsum(milliseconds) / len(milliseconds)
    deviation = math.sqrt(math.fsum((each - mean) ** 2 for each in milliseconds) / len(milliseconds))
    return {
        f"mean_{name}_ms": mean,
        f"median_{name}_ms": percentile(milliseconds, 0.5),
        f"std_{name}_ms": deviation,
        **{f"p{share}_{name}_ms": percentile(milliseconds, share / 100) for share in _PERCENTILES},
    }


def _most_in_a_second(records: Sequence[RequestRecord]) -> int:
    """Requests that were under way in one second, of those counted from the first one's due time."""
    served = [(record.scheduled_at, record.arrivals[-1].at) for record in records if record.arrivals]
    start = min((due for due, _ in served), default=0.0)
    seconds = Counter(
        second for due, last in served for second in range(int(due - start), int(last - start) + 1)
    )
    return max(seconds.values(), default=0)
