"""Chunks that are told apart by a letter, about ferries, and what finds, plans and renders them."""

from latency.model import PrefillModel
from latency.speed import SpeedEstimate
from prompt_builder.builder import PromptBuilder
from prompt_builder.labels import Renderer
from prompt_builder.planner import Planner
from prompt_builder.template import ChatTemplate
from prompt_builder.types import Plan
from retrieval.types import Candidate, Candidates, Chunk
from tests.support.prompts import CHATML, ByteTokenizer

BLOCK_TOKENS = 16
TOKENIZER = ByteTokenizer()
TEMPLATE = ChatTemplate(CHATML)
RENDERER = Renderer(TOKENIZER)
BUILDER = PromptBuilder(TOKENIZER, TEMPLATE, "Answer.", BLOCK_TOKENS)
PLANNER = Planner(TOKENIZER, TEMPLATE, "Answer.", evidence_lines=0)
SPEED = SpeedEstimate(PrefillModel(0.0, 1e-3, 0.0), 1.0, 0.95, 99, "learned")


def chunk(name: str) -> Chunk:
    body = f"The {name} ferry leaves at nine. Dogs travel free of charge on it."
    rendered = RENDERER.render(name, body)
    return Chunk(ord(name[0]), "vs", name, f"{name}.md", 0, name, body, rendered.label, rendered, {})


def found(names: str) -> Candidates:
    """One letter a chunk, most relevant first."""
    return Candidates(tuple(Candidate(chunk(name), 0.9 - place / 100) for place, name in enumerate(names)))


def names(plan: Plan) -> str:
    """Of its chunks, in their order."""
    return "".join(each.file_id for each in plan.chunks)
