"""The conversation that a request goes on with, as far as it is known."""

from functools import cache, partial
from typing import Protocol

from gateway.budgets import Budget
from gateway.context import RequestContext
from gateway.messages import Conversation, plain_transcript, read_conversation
from gateway.models import ModelName
from gateway.replicas import Replicas
from gateway.wire import ChatRequest, invalid
from prompt_builder.transcripts import Transcripts, without_files
from prompt_builder.types import Transcript


class FileLookup(Protocol):
    def answers(self, tenant: str, file_id: str) -> bool:
        """Whether the file still stands in a store of the tenant."""


class Resumer:
    """Recognises conversations by what was recorded of them, or by their name."""

    def __init__(self, replicas: Replicas, transcripts: Transcripts, files: FileLookup) -> None:
        self._replicas = replicas
        self._transcripts = transcripts
        self._files = files

    async def resume(
        self,
        request: ChatRequest,
        context: RequestContext,
        name: ModelName,
        has_stores: bool,
        budget: Budget,
        *,
        moves: bool,
    ) -> Conversation | None:
        """The conversation with what is known of it, deleted text included; None for a request to pass through.

        A request that states a budget hands its history to the planner, and so does one whose system text `moves`.
        """
        extension = request.headstart
        kept = extension.conversation if extension else None
        planned = has_stores or kept is not None or (extension is not None and extension.budgeted)
        if not planned and not moves and len(request.messages) < 3:
            return None
        template = self._replicas.serving.template
        conversation = read_conversation(request, template_reads_names=template is not None and template.reads_names)
        if conversation is None:
            if has_stores or kept is not None:
                raise invalid("messages: retrieval needs a user message with text to search for.", "messages")
            return None
        if not conversation.plain:
            if kept is not None:
                raise invalid("headstart.conversation takes messages of plain text only.", "headstart.conversation")
            return conversation.with_transcript(plain_transcript(conversation)) if planned else None
        if kept is not None:
            earlier = await self._transcripts.load(context.tenant, request.user, kept)
            conversation = conversation.continuing(tuple(earlier))
        resumed = await self._transcripts.resume(context.tenant, request.user, name.served, conversation.messages)
        if not planned and not moves and not resumed.known:
            return None
        return conversation.with_transcript(resumed)

    def without_deleted(self, transcript: Transcript, tenant: str) -> Transcript:
        """Deleted text answers nothing, not from an earlier turn either. Reads the database where `holds_files`."""
        # Most chunks of a conversation are of a few files: each is asked for once.
        return without_files(transcript, cache(partial(self._files.answers, tenant)))


def holds_files(transcript: Transcript) -> bool:
    """Whether text of files, which may be deleted by now, stands in what is known of the past."""
    return bool(transcript.summary_files or any(message.context for message in transcript.past))
