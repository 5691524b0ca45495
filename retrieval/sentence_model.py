"""A sentence-transformers model, run as one graph of ONNX Runtime where that gives the same vectors."""

import logging
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

log = logging.getLogger("headstart.embedding")

Vector = NDArray[np.float32]

# Small batches: padding costs less, and a cancelled ingestion stops soon.
BATCH = 16

# The graph keeps a text's attention whole, heads × tokens² × 4 bytes, and holds the weights a second time.
_LONGEST_TOKENS = 512
_LARGEST_BYTES = 1 << 30

# Shorter and longer than the text that the graph is made from: what was baked into it shows.
_EXAMPLE = "When does the first ferry of the morning leave the harbour?"
_PROBES = ("Why?", "What does the harbour office say of the ferries? " * 40)
_TOLERANCE = 1e-5


class SentenceModel:
    """Embeds texts in the calling thread alone; any number of threads may call at once.

    The library takes hundreds of steps in Python for each text, and each of them waits for its turn beside a busy
    Python thread. ONNX Runtime takes one, on weights that it packed once; it runs one text at a time, so that nothing
    is padded. A model that it cannot run, or runs to other vectors than the library, stays with the library.
    """

    def __init__(self, library: "SentenceTransformer") -> None:
        self._library: Any = library
        self._graph = self._checked_graph()

    @property
    def as_graph(self) -> bool:
        """Whether ONNX Runtime runs it."""
        return self._graph is not None

    @property
    def dimension(self) -> int | None:
        """Length of a vector, as far as the model says it."""
        found: int | None = self._library.get_embedding_dimension()
        return found

    def embed(self, texts: list[str]) -> Vector:
        """float32 [len(texts), dimension], rows of length 1; `texts` is not empty."""
        if self._graph is None:
            return self._by_library(texts)
        return np.concatenate([self._by_graph(self._graph, text) for text in texts])

    def _by_library(self, texts: list[str]) -> Vector:
        found = self._library.encode(
            texts, batch_size=BATCH, normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False
        )
        return np.ascontiguousarray(found, dtype=np.float32)

    def _by_graph(self, graph: Any, text: str) -> Vector:
        ids = self._library.preprocess([text])["input_ids"].numpy()
        if not 1 < ids.shape[1] <= _LONGEST_TOKENS:
            return self._by_library([text])
        (vectors,) = graph.run(None, {"ids": ids})
        return np.ascontiguousarray(vectors, dtype=np.float32)

    def _checked_graph(self) -> Any:
        try:
            graph = _graph(self._library)
            same = all(
                np.allclose(self._by_graph(graph, text), self._by_library([text]), rtol=0, atol=_TOLERANCE)
                for text in _PROBES
            )
        except Exception as error:  # another type for each thing that a model can have and a graph cannot
            log.warning("the embedding model cannot be run as a graph, and takes twice as long: %s", error)
            return None
        if not same:
            log.info("the embedding model is not run as a graph: its vectors would be others")
        return graph if same else None


def _graph(library: Any) -> Any:
    """An `onnxruntime.InferenceSession`: ids [1, tokens] to a vector [1, dimension] of length 1."""
    import onnx
    import onnxruntime
    import torch

    class Sentence(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.library = library

        def forward(self, ids: Any) -> Any:
            vectors = self.library({"input_ids": ids, "attention_mask": torch.ones_like(ids)})["sentence_embedding"]
            return torch.nn.functional.normalize(vectors, dim=1)

    weights = list(library.parameters())
    if sum(each.nbytes for each in weights) > _LARGEST_BYTES or any(each.dtype != torch.float32 for each in weights):
        raise ValueError("too large to be held twice, or in a format that ONNX Runtime computes otherwise")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    # An arena would keep what the longest text needed, for each thread.
    options.enable_cpu_mem_arena = False
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # what tracing takes for constant is what the probes are for
        path = Path(folder) / "model.onnx"
        torch.onnx.export(
            Sentence(),
            (library.preprocess([_EXAMPLE])["input_ids"],),
            path,
            input_names=["ids"],
            dynamic_axes={"ids": {1: "tokens"}},
            dynamo=False,  # the other exporter takes eight seconds instead of one, and another package
        )
        # Weights in a file of their own are mapped instead of read, which takes 60 MB less.
        onnx.save(onnx.load(path), path, save_as_external_data=True, location="weights")
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
