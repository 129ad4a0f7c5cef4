"""Batches as the kernels read them: checked, planned and sent to the device once for all layers of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from pageturner.kernels import checks
from pageturner.kernels.address_checks import BATCH_TENSORS, HOST_ARRAYS, CheckedBatch
from pageturner.kernels.cuda.attention_plan import AttentionShape
from pageturner.kernels.cuda.attention_planner import AttentionPlanner
from pageturner.kernels.cuda.device_plan import DevicePlan, Partials, make_partials
from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.layout import AttentionBatch, HostBatch


@dataclass(slots=True)
class Step:
    """A batch, its tensors contiguous, and its plans. host: None where the plans are not ours to make."""

    batch: AttentionBatch
    host: HostBatch | None
    plans: dict[AttentionShape, DevicePlan] = field(default_factory=dict)
    query_start_loc: torch.Tensor = field(init=False)
    seq_lens: torch.Tensor = field(init=False)
    block_tables: torch.Tensor = field(init=False)
    slot_mapping: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        for name in HOST_ARRAYS:
            setattr(self, name, getattr(self.batch, name).contiguous())


class Steps:
    """The step at hand, and those that a graph has captured.

    shapes: what plans were asked for so far, in that order.
    """

    def __init__(self, device: torch.device, planner: AttentionPlanner) -> None:
        self.planner = planner
        self.shapes: dict[AttentionShape, None] = {}
        self._device = device
        self._checked_batch = CheckedBatch()
        self._current: Step | None = None
        self._registered: dict[int, Step] = {}
        self._partials: dict[tuple[int, int], Partials] = {}

    def of(self, batch: AttentionBatch, kv_layer: torch.Tensor) -> Step:
        """Raises KernelArgumentError for a batch that reads or writes beyond its tables or the pool."""
        if registered := self._registered.get(id(batch)):
            return registered
        if self._current is None or self._current.batch is not batch:
            self._check_device(batch)
        is_new = self._checked_batch.check(batch, kv_layer)
        if is_new or self._current is None or self._current.batch is not batch:
            self._current = Step(batch, self._checked_batch.host)
        return self._current

    def register(self, batch: AttentionBatch, plans: Mapping[AttentionShape, DevicePlan]) -> None:
        """See CudaOps.register."""
        self._check_device(batch)
        for name in HOST_ARRAYS:
            if not getattr(batch, name).is_contiguous():
                raise KernelArgumentError(name, "strided", "contiguous, in a batch with a plan of its own")
        self._registered[id(batch)] = Step(batch, None, dict(plans))

    def forget(self, batch: AttentionBatch) -> None:
        """Undo `register`."""
        del self._registered[id(batch)]

    def plan(self, step: Step, shape: AttentionShape) -> DevicePlan:
        """The plan of a step for a shape, made when first asked for.

        Raises KernelArgumentError for a registered batch that has none.
        """
        if (plan := step.plans.get(shape)) is not None:
            return plan
        if step.host is None:
            raise KernelArgumentError("batch", f"registered without a plan for {shape}", "one for each shape")
        self.shapes[shape] = None
        made = self.planner.plan(step.host.query_start_loc, step.host.seq_lens, shape)
        plan = DevicePlan.send(made, self._room_for_partials(made.num_partials, shape), self._device)
        step.plans[shape] = plan
        return plan

    def _room_for_partials(self, count: int, shape: AttentionShape) -> Partials:
        """One buffer for all layers and steps, which take turns with it in stream order; it only grows."""
        key = (shape.num_kv_heads, shape.head_dim)
        if key not in self._partials or self._partials[key][0].shape[0] < count:
            self._partials[key] = make_partials(count, shape, self._device)
        return self._partials[key]

    def _check_device(self, batch: AttentionBatch) -> None:
        checks.check_device(self._device, **{name: getattr(batch, name) for name in BATCH_TENSORS})
