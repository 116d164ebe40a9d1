"""The tiny model of the tests of gptjax.bench, as a config and as a config file."""

import pytest

from gptjax.models.gpt2 import GPT2Config

TINY = GPT2Config(vocab_size=61, padded_vocab_size=64, block_size=8, n_layer=2, n_head=2, n_embd=16)
CARD = """
from gptjax.config import Config
from gptjax.models.gpt2 import GPT2Config
model = GPT2Config(
    vocab_size=61, padded_vocab_size=64, block_size=8, n_layer=2, n_head=2, n_embd=16, norm='xla'
)
config = Config(model=model, sequence_length=8, batch_tokens=32, micro_batch=2)
"""


@pytest.fixture
def card(tmp_path):
    path = tmp_path / "tiny.py"
    path.write_text(CARD)
    return str(path)
