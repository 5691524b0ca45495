"""BERT sentence encoders without their library: packed weights, one text at a time, no padding.

Import it in the thread that loads a model: torch takes seconds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
import tokenizers
import torch
import torch.nn.functional as functional
from numpy.typing import NDArray

Vector = NDArray[np.float32]

MOST_DIFFERENCE = 1e-5
"""In any number of a vector of length 1; what the order of additions makes is a hundredth of it."""

PROBES = (
    "",
    "When does the first ferry leave on Sundays?",
    "Bệnh viện mở cửa 24/24. Собаки (да!) — कुत्ते मुफ़्त हैं। 港は朝に開く。",
    "The harbour master keeps the log of every berth, and of each boat that has left it. " * 40,
)


class SentenceModel(Protocol):
    @property
    def dimension(self) -> int: ...

    def embed(self, texts: Sequence[str]) -> Vector:
        """float32 [len(texts), dimension], rows of length 1. Blocking; usable from any thread."""


Linear = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _Layer:
    """Matrices with their bias; `*_norm` are weight and bias of the layer norm behind them."""

    attend: Linear
    merge: Linear
    merge_norm: tuple[Any, Any]
    widen: Linear
    narrow: Linear
    narrow_norm: tuple[Any, Any]


class BertSentences:
    """A BERT encoder whose token states are averaged, or whose first one is taken, on one core.

    The library spends a third of a short question's time around the matrices, and multiplies them from a layout that
    must be packed anew each time. Made by `of`, which makes sure that the vectors are the library's.
    """

    def __init__(self, model: Any) -> None:
        """Raises AttributeError, TypeError or ValueError for a model of another kind."""
        body, pooling = model[0].auto_model, model[1]
        config = body.config
        _check(config.model_type == "bert" and config.hidden_act == "gelu" and not config.is_decoder)
        _check(getattr(config, "position_embedding_type", "absolute") == "absolute")
        _check(body.embeddings.word_embeddings.weight.dtype == torch.float32)
        _check(pooling.pooling_mode in ("mean", "cls") and model.default_prompt_name is None)
        _check([type(part).__name__ for part in model] in (["Transformer", "Pooling", "Normalize"], _UNNORMALIZED))
        self._first_only = pooling.pooling_mode == "cls"
        self._tokenizer = tokenizers.Tokenizer.from_str(model[0].tokenizer.backend_tokenizer.to_str())
        self._tokenizer.no_padding()
        self._tokenizer.enable_truncation(int(model.max_seq_length))
        self._heads = int(config.num_attention_heads)
        self._epsilon = float(config.layer_norm_eps)
        with torch.inference_mode():
            inputs = body.embeddings
            self._words = inputs.word_embeddings.weight.detach()
            self._places = inputs.position_embeddings.weight + inputs.token_type_embeddings.weight[0]
            self._input_norm = _norm(inputs.LayerNorm)
            self._layers = [_layer(layer) for layer in body.encoder.layer]

    @classmethod
    def of(cls, model: Any) -> Self | None:
        """The encoder of a sentence-transformers model; None where it is of another kind or gives other vectors."""
        try:
            made = cls(model)
            own = made.embed(PROBES)
        except (AttributeError, IndexError, TypeError, ValueError, RuntimeError):
            return None
        expected = model.encode(list(PROBES), normalize_embeddings=True, show_progress_bar=False)
        same = own.shape == expected.shape and float(np.abs(own - expected).max()) <= MOST_DIFFERENCE
        return made if same else None

    @property
    def dimension(self) -> int:
        return int(self._words.shape[1])

    def embed(self, texts: Sequence[str]) -> Vector:
        """As `SentenceModel`. Long texts are cut as the library cuts them."""
        # Each new thread begins with a team of them.
        torch.set_num_threads(1)
        with torch.inference_mode():
            return np.stack([self._vector(self._tokenizer.encode(text).ids).numpy() for text in texts])

    def _vector(self, ids: list[int]) -> Any:
        """float32 [dimension] of length 1."""
        count, width = len(ids), (self.dimension,)
        states = functional.embedding(torch.tensor(ids), self._words) + self._places[:count]
        states = functional.layer_norm(states, width, *self._input_norm, self._epsilon)
        for layer in self._layers:
            heads = layer.attend(states).view(1, count, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
            seen = functional.scaled_dot_product_attention(*heads)[0].transpose(0, 1).reshape(count, -1)
            states = functional.layer_norm(layer.merge(seen) + states, width, *layer.merge_norm, self._epsilon)
            wide = functional.gelu(layer.widen(states))
            states = functional.layer_norm(layer.narrow(wide) + states, width, *layer.narrow_norm, self._epsilon)
        return functional.normalize(states[0] if self._first_only else states.mean(0), dim=0)


_UNNORMALIZED = ["Transformer", "Pooling"]


def _layer(layer: Any) -> _Layer:
    attention, output = layer.attention.self, layer.attention.output
    three = (attention.query, attention.key, attention.value)
    return _Layer(
        attend=_linear(torch.cat([one.weight for one in three]), torch.cat([one.bias for one in three])),
        merge=_linear(output.dense.weight, output.dense.bias),
        merge_norm=_norm(output.LayerNorm),
        widen=_linear(layer.intermediate.dense.weight, layer.intermediate.dense.bias),
        narrow=_linear(layer.output.dense.weight, layer.output.dense.bias),
        narrow_norm=_norm(layer.output.LayerNorm),
    )


def _linear(weight: Any, bias: Any) -> Linear:
    """x -> x weightᵀ + bias, the weight in oneDNN's own layout where torch has it: 2.5 times faster for 20 rows."""
    bias = bias.detach()
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        apply = torch.ops.mkldnn._linear_pointwise
        apply(weight[:1], packed, bias, "none", [], "")
    except (AttributeError, RuntimeError):  # a torch that was built without it, or for another kind of processor
        kept = weight.detach()
        return lambda states: functional.linear(states, kept, bias)
    return lambda states: apply(states, packed, bias, "none", [], "")


def _norm(module: Any) -> tuple[Any, Any]:
    return module.weight.detach(), module.bias.detach()


def _check(holds: bool) -> None:
    if not holds:
        raise ValueError("not a BERT sentence encoder of this kind")
