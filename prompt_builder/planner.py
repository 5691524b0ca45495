"""What goes into a prompt: which chunks in which form, which rendering of the past, on which replica."""

from collections.abc import Sequence
from dataclasses import replace

from latency.model import UNBOUNDED_TOKENS
from prompt_builder.alternatives import alternatives
from prompt_builder.bodies import SentenceMemo
from prompt_builder.budget import Filled, Filling
from prompt_builder.choice import distinct
from prompt_builder.companions import NOTHING_KNOWN, Together
from prompt_builder.drafts import Drafts, Layout, whole_forms
from prompt_builder.extracts import Extracts
from prompt_builder.forecast import means_of
from prompt_builder.layout import block_tokens, blocks_of, for_template, scaffold_tokens
from prompt_builder.material import Frames, Front, Material
from prompt_builder.outlook import Clock, Outlook, Prefix
from prompt_builder.renderings import boundaries
from prompt_builder.reorder import cached_tokens, reordered
from prompt_builder.request import Choice, Request
from prompt_builder.shortlist import shortlist
from prompt_builder.template import ChatTemplate
from prompt_builder.types import (
    Alternative,
    ChunkOrder,
    Dropped,
    Limits,
    Plan,
    Prompt,
    Rendering,
    RenderingChoice,
    Tokenizer,
    Transcript,
)
from prompt_builder.window import TURNS_PER_CUT, Room, Window
from retrieval.types import Candidates

__all__ = ["TURNS_PER_CUT", "Planner"]

NO_BUDGET = Clock(None, 0.0)


class Planner:
    """Pure: the same arguments give the same plan.

    Rendering. Past turns stand with their chunks (`kept`), without (`stripped`), or, with `auto`, the oldest without
    and the others with them, as the replica's fitted model says is cheapest for this turn and those to come
    (`renderings`). Where no speed is known `auto` is `stripped`.

    Budget. With a budget the plan with the most relevance that is predicted to keep it is taken, over all replicas,
    renderings and forms of the chunks; ties go to the cheapest (`budget`). Where nothing keeps it, the smallest plan
    is taken, and its forecast says that it does not fit. Without a budget everything wanted goes in whole.

    Order. `reuse` puts the chunks first that continue what the replica holds of the prompt, then those that requests
    to come are likely to have too, by what requests `past` had (`order`).

    Window. In a window that is too small `auto` strips past turns first. Then things leave in this order, each with a
    reason in `Plan.dropped`: chunks, least relevant first, down to one; then whole turns, oldest first; then
    `max_tokens` shrinks, down to `min_answer_tokens`; then evidence and the last chunk. A `max_tokens` above half of
    the window claims only that half against chunks and turns (a client that asks for everything must not lose its
    documents for it) and is cut to what is left. System text, facts and question always stay.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        instructions: str,
        *,
        rendering: RenderingChoice = "stripped",
        chunk_order: ChunkOrder = "reuse",
        evidence_lines: int = 1,
        pin_last: int = 0,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._instructions = instructions
        self._rendering: RenderingChoice = rendering
        self._layout = Layout(chunk_order, pin_last, evidence_lines)
        self._frames = Frames(tokenizer, template)
        self._sentences = SentenceMemo()
        self._extracts = Extracts(tokenizer, memo=self._sentences)

    def plan(
        self,
        transcript: Transcript,
        candidates: Candidates,
        limits: Limits,
        outlooks: Sequence[Outlook] = (),
        clock: Clock = NO_BUDGET,
        past: Together = NOTHING_KNOWN,
        material: Material | None = None,
    ) -> Plan:
        """`material` where the transcript has been measured `ahead`.

        Raises QuestionTooLong when system text and question alone do not fit the window.
        """
        request = self._request(transcript, candidates, limits, outlooks, clock, past, material)
        if request.means and clock.budget_s is not None:
            plan = self._within_budget(request)
        else:
            plan = self._everything(request)[0]
        if self._rendering == "kept":
            plan = replace(plan, rendering="kept")
        if request.clashes:
            plan = replace(plan, dropped=(*plan.dropped, *request.clashes))
        if request.room is None or plan.max_tokens is None:
            return plan
        forecast = plan.forecast
        tokens = self.tokens(plan) if forecast is None else forecast.cached_tokens + forecast.uncached_tokens
        return self._clamped(plan, tokens, request.room)

    def ahead(self, transcript: Transcript, limits: Limits) -> Material:
        """The transcript measured, as far as no candidates are needed for it: for one plan of it, in one thread."""
        material = self._material(transcript, limits)
        material.chunks_standing(self.standing(material, transcript))
        return material

    def standing(self, material: Material, transcript: Transcript) -> Front:
        """The past as the conversation's last prompt rendered it: what a replica may hold."""
        count = len(material.turns)
        if self._rendering == "auto":
            count = material.leading_turns(transcript.stripped - transcript.folded)
        return material.front(0, 0 if self._rendering == "kept" else count)

    def begun(self, material: Material, front: Front) -> Plan:
        """A plan of the front alone, as plans with it are: for the builder's `opening`."""
        rendering: Rendering = "kept" if self._rendering == "kept" else front.rendering
        return replace(material.bare, past=front.past, stripped=front.stripped, rendering=rendering)

    def alternatives(
        self,
        transcript: Transcript,
        candidates: Candidates,
        limits: Limits,
        outlooks: Sequence[Outlook] = (),
        clock: Clock = NO_BUDGET,
    ) -> tuple[Alternative, ...]:
        """What other budgets would allow, on the replica and in the rendering that no budget would choose.

        Empty where no speed is known. Raises QuestionTooLong.
        """
        request = self._request(transcript, candidates, limits, outlooks, replace(clock, budget_s=None))
        if not request.means:
            return ()
        choice = self._everything(request)[1]
        most = UNBOUNDED_TOKENS if request.room is None else request.room.prompt_tokens
        return () if choice is None else alternatives(request.filling, choice.draft.front, choice.means, most)

    def reordered(
        self, plan: Plan, prompt: Prompt, limits: Limits, outlook: Outlook, past: Together = NOTHING_KNOWN
    ) -> Plan:
        """A plan whose prompt has waited: its chunks in the order for what the replica holds now, where that is ours.

        Itself where the order is not `reuse`, where nothing changes, and where the prompt has no ids.
        """
        layout = self._layout_for(limits)
        if layout.order != "reuse" or prompt.token_ids is None:
            return plan
        return reordered(plan, prompt, outlook.prefix, past, layout.pin_last)

    def cached_tokens(self, plan: Plan, prompt: Prompt, limits: Limits, prefix: Prefix) -> int | None:
        """What the plan would find of this empty prompt on a replica, ordered once more; None without ids."""
        if prompt.token_ids is None:
            return None
        layout = self._layout_for(limits)
        if layout.order != "reuse":
            return prefix.extended(prompt.token_ids).cached_tokens()
        return cached_tokens(plan, prompt, prefix, layout.pin_last)

    def tokens(self, plan: Plan) -> int:
        """Prompt tokens of a plan, as the builder will count them."""
        blocks = for_template(blocks_of(self._instructions, plan), self._template)
        roles = [block.role for block in blocks]
        contents = sum(block_tokens(block, self._tokenizer) for block in blocks)
        return contents + scaffold_tokens(roles, self._tokenizer, self._template)

    def _request(
        self,
        transcript: Transcript,
        candidates: Candidates,
        limits: Limits,
        outlooks: Sequence[Outlook],
        clock: Clock,
        past: Together = NOTHING_KNOWN,
        material: Material | None = None,
    ) -> Request:
        ranked, clashes = distinct(candidates.items, limits.top_k)
        material = material or self._material(transcript, limits)
        drafts = Drafts(material, self._layout_for(limits), self._tokenizer, self._sentences, past)
        room = None if limits.window_tokens is None else Room.of(limits, limits.window_tokens)
        rendering: Rendering = "kept" if self._rendering == "kept" else "stripped"
        wholes = whole_forms(ranked, self._tokenizer)
        wanted = tuple(wholes[: limits.top_k])
        means = means_of(outlooks, clock, material) if material.has_ids else []
        return Request(
            transcript=transcript,
            limits=limits,
            wanted=wanted,
            clashes=tuple(clashes),
            drafts=drafts,
            window=None if room is None else Window(drafts, rendering, room, self._tokenizer),
            room=room,
            means=shortlist(means, self.standing(material, transcript), wanted),
            held=outlooks[0].prefix if outlooks and material.has_ids else None,
            filling=Filling(drafts, self._extracts, wholes, limits.top_k),
            tokenizer=self._tokenizer,
        )

    def _material(self, transcript: Transcript, limits: Limits) -> Material:
        bare = Plan(
            system=transcript.system,
            past=(),
            rendering="stripped",
            chunks=(),
            references=(),
            evidence="",
            facts=transcript.facts,
            question=transcript.question,
            max_tokens=limits.max_tokens,
            dropped=(),
            summary=transcript.summary,
            folded=transcript.folded,
            instructed=limits.instructed,
        )
        return Material(self._tokenizer, self._template, self._frames, self._instructions, transcript, bare)

    def _layout_for(self, limits: Limits) -> Layout:
        own = self._layout
        return Layout(
            order=own.order if limits.chunk_order is None else limits.chunk_order,
            pin_last=own.pin_last if limits.pin_last is None else limits.pin_last,
            evidence_lines=own.evidence_lines if limits.evidence_lines is None else limits.evidence_lines,
        )

    def _fronts(self, request: Request) -> list[Front]:
        """The renderings of the whole past to choose from; the first one changes nothing."""
        material = request.drafts.material
        count = len(material.turns)
        if self._rendering == "kept":
            return [material.front(0, 0)]
        if self._rendering == "stripped" or not request.means:
            return [material.front(0, count)]
        stripped = boundaries(count, request.stripped_turns)
        return [material.front(0, turns) for turns in material.distinct(stripped)]

    def _everything(self, request: Request) -> tuple[Plan, Choice | None]:
        """All wanted chunks whole, in the cheapest rendering that the window holds; trimmed where none does."""
        drafts, window = request.drafts, request.window
        dropped: list[Dropped] = []
        fronts = self._fronts(request)
        if window is not None:
            fronts = [front for front in fronts if window.holds(drafts.draft(front, request.wanted))]
        made = [drafts.draft(front, request.wanted, evidence=True) for front in fronts]
        if not made and window is not None:
            trimmed, dropped = window.trimmed(request.wanted)
            made = [trimmed]
        if not request.means:
            return request.unpriced(made[0], dropped), None
        placed = [
            (drafts.behind(draft, means.prefix(draft.front)), means) for means in request.means for draft in made
        ]
        choices = request.priced(
            [(Filled(draft, means.foresee(draft.front, draft.tail.ids)), means) for draft, means in placed]
        )
        best = min(choices, key=lambda choice: choice.price_s)
        return request.finished(best, dropped), best

    def _within_budget(self, request: Request) -> Plan:
        """The most relevant of the plans that keep the budget; the smallest plan where none does."""
        drafts, window, room = request.drafts, request.window, request.room
        fronts = self._fronts(request)
        most, cut = UNBOUNDED_TOKENS, 0
        if window is not None and room is not None:
            most = room.prompt_tokens
            # Evidence comes where it fits: no turn leaves for it under a budget.
            fronts = [front for front in fronts if drafts.draft(front, request.wanted[:1]).tokens <= most]
            if not fronts:
                front = window.front(request.wanted)
                fronts, cut = [front], front.cut
                if drafts.draft(front, ()).tokens > most:
                    most = room.most_prompt_tokens
        pairs = [(front, means) for means in request.means for front in fronts]
        filled = [(request.filling.fill(front, means, most), means) for front, means in pairs]
        kept = [(one, means) for one, means in filled if one.forecast.fits]
        if kept:
            # Equal to nine digits is equal: sums of floats differ by the order of their terms.
            relevance = max(round(one.draft.relevance, 9) for one, _ in kept)
            equal = [(one, means) for one, means in kept if round(one.draft.relevance, 9) == relevance]
            best = min(request.priced(equal), key=lambda choice: choice.price_s)
        else:
            # What keeps no budget has no chunks.
            least = [Choice(request.filling.least(bare, means, most), means) for bare, means in filled]
            best = min(least, key=lambda choice: choice.filled.forecast.ttft_s)
        dropped = [*request.left_out(best, most), *(window.dropped_turns(cut) if window is not None else ())]
        return request.finished(best, dropped)

    def _clamped(self, plan: Plan, tokens: int, room: Room) -> Plan:
        left = room.window_tokens - tokens
        if plan.max_tokens is None or plan.max_tokens <= left:
            return plan
        reason = (
            f"{tokens} prompt tokens and max_tokens {plan.max_tokens} exceed the window of {room.window_tokens} "
            f"tokens: max_tokens is {left}."
        )
        clamped = Dropped("max_tokens", str(plan.max_tokens), reason)
        return replace(plan, max_tokens=left, dropped=(*plan.dropped, clamped))
