"""One tenant's prompts against replicas whose caches are simulated, with what is told of their breaks."""

from cache.residency import Residency
from cache.sent import Sent
from prompt_builder.breaks import PrefixBreak, Story, find_break, places_to_record
from prompt_builder.types import Prompt

BLOCK = 16


class Fleet:
    """Replicas with `capacity` blocks of BLOCK tokens each, and what is remembered of the prompts sent to them."""

    def __init__(self, *names: str, capacity: int = 1000, sent: Sent | None = None) -> None:
        self.sent = Sent() if sent is None else sent
        self.caches = {name: Residency(BLOCK, capacity) for name in names or ("one",)}
        self.epochs = dict.fromkeys(self.caches, 0)

    def restart(self, name: str = "one") -> None:
        self.caches[name].clear()
        self.epochs[name] += 1

    def ask(self, prompt: Prompt, story: Story, *, replica: str = "one", salt: str = "") -> PrefixBreak:
        """Sends a prompt, has it computed, and tells where it broke."""
        since = self.sent.now()
        cached = self.compute(prompt, replica, salt)
        return self.answered(prompt, story, cached, since, replica=replica, salt=salt)

    def compute(self, prompt: Prompt, replica: str = "one", salt: str = "") -> int:
        """What the engine reports as cached; the prompt is in its cache then."""
        assert prompt.token_ids is not None
        cache = self.caches[replica]
        lease = cache.begin(prompt.token_ids, salt, prompt.block_hashes)
        cache.generated(lease, ())
        cache.end(lease)
        return lease.cached_tokens

    def answered(
        self, prompt: Prompt, story: Story, cached: int, since: int, *, replica: str = "one", salt: str = ""
    ) -> PrefixBreak:
        view = self.sent.view(replica, self.epochs[replica], since, salt.encode())
        found = find_break(prompt, story, cached, BLOCK, salt, view)
        assert found is not None
        places = places_to_record(prompt, story, cached, BLOCK, salt, view)
        self.sent.record(replica, self.epochs[replica], prompt.block_hashes, places, salt.encode())
        return found
