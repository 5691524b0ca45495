"""A tokenizer and chat templates that are small enough to reason about."""

CHATML = (
    "{% for message in messages %}{{ '<S>' + message['role'] + '\n' + message['content'] + '<E>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<S>assistant\n' }}{% endif %}"
)
STRICT = (
    "<S>{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}[{{ message['content'] }}]{% endfor %}"
)


class ByteTokenizer:
    """One token a byte; `<S>` and `<E>` are control tokens 256 and 257."""

    name = "bytes"
    fingerprint = "bytes"
    exact = True

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def encode_scaffold(self, text: str) -> tuple[int, ...]:
        marked = text.replace("<S>", "\x01").replace("<E>", "\x02")
        return tuple(255 + ord(char) if char in "\x01\x02" else ord(char) for char in marked)

    def count(self, text: str) -> int:
        return len(text.encode())
