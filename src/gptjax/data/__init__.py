"""Training data: shards, tokenizers, preparation (`python -m gptjax.data`), resumable loader.

Every error that a user can correct is a `DataError`. The package imports NumPy only; `Loader`
imports grain.
"""

from gptjax.data.corpora import CorpusError
from gptjax.data.dataset import Dataset, check_dataset, find_dataset
from gptjax.data.fineweb import prepare_fineweb
from gptjax.data.loader import Batch, Loader, Windows, fixed_batches
from gptjax.data.manifest import DatasetError
from gptjax.data.packing import Packing, Stretch
from gptjax.data.prepare import Options, PrepareError, prepare_corpus, prepare_stdlib
from gptjax.data.shards import DataError, ShardError, open_shard, write_shard
from gptjax.data.tokenizers import (
    Tokenizer,
    TokenizerError,
    TokenizerUnavailable,
    choose_tokenizer,
    get_tokenizer,
)

__all__ = [
    "Batch",
    "CorpusError",
    "DataError",
    "Dataset",
    "DatasetError",
    "Loader",
    "Options",
    "Packing",
    "PrepareError",
    "ShardError",
    "Stretch",
    "Tokenizer",
    "TokenizerError",
    "TokenizerUnavailable",
    "Windows",
    "check_dataset",
    "choose_tokenizer",
    "find_dataset",
    "fixed_batches",
    "get_tokenizer",
    "open_shard",
    "prepare_corpus",
    "prepare_fineweb",
    "prepare_stdlib",
    "write_shard",
]
