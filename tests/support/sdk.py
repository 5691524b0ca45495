"""Messages as the official client's types want them."""

from openai.types.chat import ChatCompletionMessageParam


def asking(question: str) -> list[ChatCompletionMessageParam]:
    """One question of a user."""
    return [{"role": "user", "content": question}]
