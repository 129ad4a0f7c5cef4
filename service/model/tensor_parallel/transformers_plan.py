"""A model of `transformers` on several ranks, by the plan that `transformers` has for its type.

`PreTrainedModel.tp_plan` says of each module how it is cut; what carries the plan out is ours, over
`Collectives`: transformers' own wants a process group that is torch's default, and adds in no stated order.
Whether the outcome is right the probe tells, which compares it with the whole model before it serves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from pageturner.service.errors import ConfigError
from pageturner.service.model.tensor_parallel.collectives import Collectives, gather_columns
from pageturner.service.model.tensor_parallel.shards import split

_KEPT_WHOLE = frozenset(
    {"replicate", "replicated_with_grad_allreduce", "embedding_rowwise", "embedding_colwise"}
)
"""Styles of what every rank keeps: norms of single heads, and the embedding, which is only looked up."""
_CUT_BY_OUTPUTS = frozenset({"colwise", "colwise_gather_output", "colwise_rep"})
_CUT_BY_INPUTS = frozenset({"rowwise", "rowwise_split_input", "rowwise_rep"})
_GATHERED = frozenset({"colwise_gather_output", "colwise_rep"})
_SPLIT_INPUT = frozenset({"rowwise_split_input", "rowwise_rep"})
_EXPERTS = "moe_tp_experts"
_PARAMETER_AXES = {
    "colwise": (-2, 1),
    "rowwise": (-1, 1),
    "packed_colwise": (-2, 2),
    "packed_rowwise": (-1, 2),
}
"""Of a bare parameter, such as the stacked weights of experts: the axis that is cut, and how many weights lie
side by side along it."""
_ATTENTION = re.compile(r"\.(self_attn|attention|attn)\.")


def shard_by_plan(model: PreTrainedModel, collectives: Collectives) -> None:
    """Keep this rank's part of the model, in whose forward ranks speak from now on.

    Raises ConfigError, by name, for a model without a plan, a style that is not known here, and sizes that
    can't be cut for so many ranks; then the model is of no more use.
    """
    plan: Mapping[str, str] = model.tp_plan or {}
    _check(model, plan, collectives.size)
    for name, module in list(model.named_modules()):
        for parameter, weight in list(module.named_parameters(recurse=False)):
            style = plan.get(_pattern(f"{name}.{parameter}"))
            if style is not None:
                setattr(module, parameter, _cut_parameter(weight, style, collectives))
        style = plan.get(_pattern(name))
        if style is None or style in _KEPT_WHOLE:
            continue
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, _sharded(name, module, style, collectives))


def _pattern(name: str) -> str:
    """A module's name as plans have it: `model.layers.3.mlp` is `model.layers.*.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _check(model: PreTrainedModel, plan: Mapping[str, str], size: int) -> None:
    kind = model.config.model_type
    if not any("layers" in name and style not in _KEPT_WHOLE for name, style in plan.items()):
        raise _refused(f"transformers has no tp_plan that cuts the layers of {kind}")
    known = _KEPT_WHOLE | _CUT_BY_OUTPUTS | _CUT_BY_INPUTS | {_EXPERTS, *_PARAMETER_AXES}
    if unknown := sorted(set(plan.values()) - known):
        raise _refused(f"the tp_plan of {kind} asks for {', '.join(unknown)}, which is not supported")
    if any(_ATTENTION.search(name) and style == "colwise" for name, style in plan.items()):
        config = model.config.get_text_config()
        for key in ("num_attention_heads", "num_key_value_heads"):
            if (heads := getattr(config, key, None)) and heads % size:
                raise _refused(f"{kind} has {key} = {heads}, which {size} ranks don't divide")


def _cut_parameter(weight: nn.Parameter, style: str, collectives: Collectives) -> nn.Parameter:
    axis, count = _PARAMETER_AXES[style]
    parts = [_own_part(each, axis, collectives) for each in weight.chunk(count, dim=axis)]
    return nn.Parameter(torch.cat(parts, dim=axis), requires_grad=False)


def _own_part(weight: torch.Tensor, axis: int, collectives: Collectives) -> torch.Tensor:
    part = _split(weight.shape[axis], collectives)[collectives.rank]
    return weight.narrow(axis, part.start, len(part)).detach().clone()


def _split(total: int, collectives: Collectives) -> Sequence[range]:
    parts = split(total, collectives.size)
    if not all(parts):
        raise _refused(f"{total} features can't be cut for {collectives.size} ranks")
    return parts


def _sharded(name: str, module: nn.Module, style: str, collectives: Collectives) -> nn.Module:
    if style == _EXPERTS:
        return _Summed(module, collectives)
    if type(module) is not nn.Linear or style not in _CUT_BY_OUTPUTS | _CUT_BY_INPUTS:
        raise _refused(f"{name} is a {type(module).__name__}, which is not cut as {style}")
    if style in _CUT_BY_OUTPUTS:
        return _ColumnParallel(module, collectives, gathers=style in _GATHERED)
    return _RowParallel(module, collectives, splits_input=style in _SPLIT_INPUT)


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


class _ColumnParallel(nn.Module):
    """This rank's outputs of a Linear, or all of them. The child is a Linear, as it is packed later."""

    def __init__(self, linear: nn.Linear, collectives: Collectives, *, gathers: bool) -> None:
        super().__init__()
        bias = None if linear.bias is None else _own_part(linear.bias, 0, collectives)
        self.linear = _linear(_own_part(linear.weight, 0, collectives), bias)
        self._widths = [len(part) for part in _split(linear.out_features, collectives)] if gathers else None
        self._collectives = collectives

    @property
    def weight(self) -> torch.Tensor:
        """For models that look at its dtype."""
        return self.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns: torch.Tensor = self.linear(x)
        return columns if self._widths is None else gather_columns(self._collectives, columns, self._widths)


class _RowParallel(nn.Module):
    """A Linear, of whose inputs this rank has its part. The bias is added to the sum."""

    def __init__(self, linear: nn.Linear, collectives: Collectives, *, splits_input: bool) -> None:
        super().__init__()
        self.linear = _linear(_own_part(linear.weight, 1, collectives), None)
        self.bias = linear.bias
        self._part = _split(linear.in_features, collectives)[collectives.rank] if splits_input else None
        self._collectives = collectives

    @property
    def weight(self) -> torch.Tensor:
        """For models that look at its dtype."""
        return self.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._part is not None:
            x = x[..., self._part.start : self._part.stop]
        total: torch.Tensor = self.linear(x).contiguous()
        self._collectives.all_reduce(total)
        return total if self.bias is None else total + self.bias


class _Summed(nn.Module):
    """A module that gives this rank's part of a sum."""

    def __init__(self, module: nn.Module, collectives: Collectives) -> None:
        super().__init__()
        self.module = module
        self._collectives = collectives

    def forward(self, *args: torch.Tensor, **keywords: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.module(*args, **keywords).contiguous()
        self._collectives.all_reduce(total)
        return total


def _refused(reason: str) -> ConfigError:
    return ConfigError("model.tensor_parallel_size", reason)
