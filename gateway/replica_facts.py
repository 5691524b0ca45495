"""What several engines have in common, and which of them is none of these."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from gateway.backends.facts import EngineFacts

Value = TypeVar("Value")


def why_refused(facts: EngineFacts, reference: EngineFacts) -> str | None:
    """Why an engine that answers cannot take another's requests; None where it can.

    Token ids of one tokenizer mean something else to another, and a prompt of another model is another prompt.
    """
    if reference.model is None or facts is reference:
        return None
    if facts.model is None:
        return facts.error or "it serves no model"
    if reference.model not in facts.models:
        return f"it serves {', '.join(facts.models)}, not {reference.model}"
    if facts.probe_ids is not None and reference.probe_ids is not None and facts.probe_ids != reference.probe_ids:
        return "its tokenizer is another one"
    return None


@dataclass(frozen=True, slots=True)
class Common:
    """What engines have in common, and for each why it is refused, None where it is not."""

    facts: EngineFacts
    refused: tuple[str | None, ...]


def in_common(engines: Sequence[EngineFacts], refused: Sequence[str | None], served: EngineFacts) -> Common:
    """Of the engines that answer and serve one model; of those that did, where none answers now.

    `refused` is what was said of each before, which stays for one that does not answer. `served` is what was in
    common before: it is what is known until one of the engines has told its model.
    """
    reference = _reference(engines, served.model)
    now = tuple(
        why_refused(facts, reference) if facts.reachable else before
        for facts, before in zip(engines, refused, strict=True)
    )
    if reference.model is None and not reference.reachable and served.model is not None:
        return Common(served.gone(reference.error), now)
    accepted = [facts for facts, reason in zip(engines, now, strict=True) if reason is None]
    return Common(merged_facts([facts for facts in accepted if facts.reachable] or [reference]), now)


def _reference(engines: Sequence[EngineFacts], served: str | None) -> EngineFacts:
    """The first that serves what is served already; before that, the first that serves anything."""
    for facts in engines:
        if facts.reachable and facts.model is not None and served in (None, facts.model):
            return facts
    known = [facts for facts in engines if facts.model is not None]
    return next(iter([*(facts for facts in known if facts.reachable), *known]), engines[0])


def merged_facts(facts: Sequence[EngineFacts]) -> EngineFacts:
    """What holds of all of these; the first one gives the names.

    A feature is there when all have it, the window is the smallest. What only concerns one replica's cache is its
    own: of block size and blocks those of the first are told.
    """
    first, *others = facts
    if not others:
        return first
    known = [one.models for one in facts]
    return replace(
        first,
        models=tuple(name for name in first.models if all(name in names for names in known)),
        max_model_len=min((one.max_model_len for one in facts if one.max_model_len is not None), default=None),
        prompt_tokens_details=_all_have([one.prompt_tokens_details for one in facts]),
        token_ids_accepted=_all_have([one.token_ids_accepted for one in facts]),
        tokenize=all(one.tokenize for one in facts),
        cache_salt=_all_have([one.cache_salt for one in facts]),
        prefix_caching=_all_have([one.prefix_caching for one in facts]),
        per_request_metrics=_all_have([one.per_request_metrics for one in facts]),
        started_s=None,
    )


def _all_have(values: Sequence[bool | None]) -> bool | None:
    """False where one has it not, None where it is not known of one."""
    if False in values:
        return False
    return None if None in values else True
