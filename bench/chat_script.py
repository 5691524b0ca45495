"""A long chat without documents: a user who states facts, talks of this and that, and asks for the facts later."""

import random
from dataclasses import dataclass

FILLER = (
    "There is much to say about it, and most of it has been said before by people who know it better. "
    "One begins slowly, looks at what others do, and takes care not to hurry. "
)


@dataclass(frozen=True, slots=True)
class Fact:
    """`words` must all be in a summary, or an answer, that holds the fact."""

    statement: str
    question: str
    words: tuple[str, ...]


FACTS = (
    Fact("My name is Marisol.", "What is my name?", ("Marisol",)),
    Fact("My dog is called Biscuit and is 7 years old.", "What is my dog called?", ("Biscuit",)),
    Fact("I live in Tromso, near the harbour.", "Which town do I live in?", ("Tromso",)),
    Fact("Our budget for the boat is 45000 euros.", "What is our budget for the boat?", ("45000",)),
    Fact("I am allergic to walnuts.", "What am I allergic to?", ("walnuts",)),
    Fact("The meeting with the yard is on 14 March.", "When is the meeting with the yard?", ("14 March",)),
    Fact("My brother Henrik will be the skipper.", "Who will be the skipper?", ("Henrik",)),
    Fact("We decided to name the boat Kittiwake.", "How will the boat be named?", ("Kittiwake",)),
)
_SUBJECTS = ("the weather in spring", "old sails", "harbour food", "knots", "lighthouses", "engines", "maps", "paint")
_ASKS = (
    "Tell me a little more about {subject}, please, and what a beginner should know of it.",
    "And what do people usually get wrong about {subject} in the first year?",
    "Let us talk about {subject} for a while; what would you do first, and why?",
)


def chat_script(turns: int, seed: int) -> list[str]:
    """`turns` user messages: a fact in every second of the first ones, at the end a question for each fact."""
    rng = random.Random(seed)
    asked = FACTS[: max(0, turns // 4)]
    script = []
    for turn in range(turns - len(asked)):
        text = rng.choice(_ASKS).format(subject=rng.choice(_SUBJECTS))
        if turn % 2 == 1 and turn // 2 < len(asked):
            text = f"{asked[turn // 2].statement} {text}"
        script.append(text)
    return script + [fact.question for fact in asked]


def holds(text: str, fact: Fact) -> bool:
    return all(word.casefold() in text.casefold() for word in fact.words)
