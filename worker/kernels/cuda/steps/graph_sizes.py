"""The choice of steps that become CUDA graphs, and the order in which these are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from worker.kernels.cuda.steps.draft_passes import PassForm
from worker.kernels.cuda.steps.recorded_forms import Form, MixedForm

_URGENT, URGENT_TOKENS = 8, 64
"""The largest graphs that are made before the first request, of single tokens and of others."""


def forms_to_make(
    sizes: Sequence[int], token_sizes: Sequence[int], *, samples: bool, adapts: bool
) -> tuple[list[Form | MixedForm | PassForm], int]:
    """All forms in the order in which they are recorded, and the number of those before the first request.

    The largest of each kind comes first: smaller ones find room in what it leaves in their common pool. Where
    there are steps that sample, those without wait. Where tokens may have adapters (`adapts`), all come once
    more, at the end: steps without adapters have none of their operations.
    """
    few, many = (
        [Form(size, whole=True) for size in sizes[::-1] if (size <= _URGENT) is f] for f in (True, False)
    )
    small, large = (
        [MixedForm(size, samples) for size in token_sizes[::-1] if (size <= URGENT_TOKENS) is f]
        for f in (True, False)
    )
    to_logits = [Form(size, whole=False) for size in sizes[::-1]]
    to_hidden = [MixedForm(size, whole=False) for size in token_sizes[::-1] if samples]
    made = [*few, *small, *large, *many, *to_logits, *to_hidden]
    return made + [replace(form, adapted=True) for form in made] * adapts, len(few) + len(small)


def with_pass(form: Form | MixedForm | PassForm) -> list[Form | MixedForm | PassForm]:
    """The form, behind the drafter's pass over such a step."""
    if isinstance(form, MixedForm) and form.whole and not form.adapted:
        return [PassForm(form.tokens), form]
    return [form]


def is_of(form: Form | MixedForm | PassForm, tokens: Sequence[int]) -> bool:
    """Whether a form is one of a step, or of a pass, of one of these numbers of tokens."""
    return not isinstance(form, Form) and form.tokens in tokens


def size_of(form: Form | MixedForm | PassForm) -> str:
    return f"{form.rows} rows" if isinstance(form, Form) else f"{form.tokens} tokens"
