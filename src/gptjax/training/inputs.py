"""Inputs of a run: dataset, tokenizer, training batches and validation batches."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from gptjax import data, parallel
from gptjax.config import Config, ConfigError
from gptjax.data import Batch
from gptjax.data.tokenizers import GPT2Tokenizer
from gptjax.models.base import count_targets
from gptjax.timeline import Span, Timeline


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Dataset and batch sizes of a run. Training tokens are read only to find documents.

    Attributes:
        dataset: shards of both splits.
        tokenizer: for samples and evaluation tasks; None if the run has neither.
        val_batch: sequences of a validation batch, over all devices.
        eot: id that begins each document, with `config.separate_documents`; else None.
        packed: number of windows in each order of windows (`Span.order`) that packs documents.
    """

    config: Config
    dataset: data.Dataset
    tokenizer: data.Tokenizer | None
    mesh: Mesh
    val_batch: int
    eot: int | None = None
    packed: Mapping[int, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def find(cls, config: Config, mesh: Mesh) -> "Inputs":
        """Find the dataset that the config names, and check that it fits the run.

        Raises:
            ConfigError: the batch is not divisible by the devices, samples cannot be decoded, the
                validation split is too small, or documents cannot be separated or packed.
            DataError: the dataset is missing or damaged, or does not fit the model.
        """
        timeline = Timeline(config)
        lengths = [config.sequence_length]
        for span in timeline.spans:
            lengths.append(span.config.sequence_length)
            try:
                span.config.micro_batches(mesh.size)
            except ConfigError as error:
                raise ConfigError(f"{timeline.name(span)}{error}") from error
        # The standard library can be prepared for either vocabulary.
        small = config.model.vocab_size < GPT2Tokenizer.vocab_size
        tokenizer = "byte" if small and config.dataset in ("auto", "stdlib") else "auto"
        dataset = data.find_dataset(config.dataset, config.data_dir, tokenizer)
        dataset = _checked_tokenizer(config, dataset)
        dataset.validate(config.model.vocab_size, max(lengths))
        try:
            texts = config.sample_every or config.eval_every
            tokenizer = dataset.load_tokenizer() if texts else None
        except (data.TokenizerUnavailable, data.DatasetError) as error:
            raise ConfigError(
                f"{error}; or train without texts: --sample-every 0 --eval-every 0"
            ) from error
        val_batch = _val_batch(timeline, dataset, mesh.size)
        eot = _eot(config, dataset)
        packed = _packed_windows(timeline, dataset, eot)
        return cls(config, dataset, tokenizer, mesh, val_batch, eot, packed)

    @functools.cached_property
    def timeline(self) -> Timeline:
        """The stages of the run."""
        return Timeline(self.config)

    @property
    def epochs(self) -> float:
        """Number of passes over the training windows in the whole run."""
        total = 0.0
        for span in self.timeline.spans:
            sequences = (span.end - span.begin) * span.config.batch
            tokens = sequences * span.config.sequence_length
            windows = self.packed.get(span.order)
            total += sequences / windows if windows else tokens / self.dataset.train_tokens
        return total

    @property
    def train_sharding(self) -> NamedSharding:
        """Sharding of (micro-batch, sequence, token)."""
        return parallel.over_batch(self.mesh, axis=1)

    @property
    def val_sharding(self) -> NamedSharding:
        """Sharding of (sequence, token)."""
        return parallel.over_batch(self.mesh, axis=0)

    def abstract_train_batch(self, stage: Config, micro_batch: int) -> Batch:
        """Return the shapes and shardings of a step's batch in a stage with this config, for
        micro-batches of this number of sequences."""
        sequences = micro_batch * self.mesh.size
        shape = (stage.batch // sequences, sequences, stage.sequence_length)
        return self._abstract(shape, self.train_sharding)

    def abstract_val_batch(self) -> Batch:
        """Return the shapes and shardings of a validation batch."""
        return self._abstract((self.val_batch, self.config.sequence_length), self.val_sharding)

    def _abstract(self, shape: tuple[int, ...], sharding: NamedSharding) -> Batch:
        x = jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding)
        return Batch(x, x, None if self.eot is None else x)

    def loader(self, step: int) -> data.Loader:
        """Return an iterator over the training batches from `step` to the end of the stage."""
        c, span = self.config, self.timeline.at(step)
        return data.Loader(
            self.dataset.train,
            sequence_length=span.config.sequence_length,
            batch=span.config.batch,
            seed=c.seed,
            start=self.timeline.position(step),
            vocab_size=c.model.vocab_size,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
            order=span.order,
            packing=_packing(span.config, self.eot),
            sequential=_stretches(self.timeline, span, self.eot),
        )

    def train_batches(self, step: int) -> Iterator[Batch]:
        """Yield the training batches after `step` steps, with a loader for each stage.

        The arrays of a `Batch` have the shape (micro-batches, sequences of this process, T).
        """
        for span in self.timeline.spans:
            if (begin := max(step, span.begin)) < span.end:
                size = span.config.micro_batches(self.mesh.size)
                with self.loader(begin) as loader:
                    for batch in itertools.islice(loader, span.end - begin):
                        yield jax.tree.map(lambda x, n=size: x.reshape(n, -1, x.shape[1]), batch)

    def val_batches(self) -> list[Batch]:
        """Return the validation batches on their devices; every call returns the same tokens.

        The windows are contiguous, even if training packs documents.
        """
        c = self.config
        batches = data.fixed_batches(
            self.dataset.val,
            sequence_length=c.sequence_length,
            batch=self.val_batch,
            count=math.ceil(c.val_tokens / (self.val_batch * c.sequence_length)),
            vocab_size=c.model.vocab_size,
            eot=self.eot,
            process_index=jax.process_index(),
            process_count=jax.process_count(),
            first=c.data_order == "sequential",
        )
        return [parallel.put(self.val_sharding, batch) for batch in batches]

    def val_weights(self, batches: list[Batch]) -> np.ndarray:
        """Return the weight of each validation batch in the mean: the number of targets with a
        loss.

        Raises:
            ConfigError: no target has a loss.
        """
        count = jax.jit(count_targets, out_shardings=parallel.replicated(self.mesh))
        weights = np.float64([count(batch.targets) for batch in batches])
        if not weights.any():
            raise ConfigError(
                f"{self.dataset.path}: expected validation tokens with a loss, found prompts only; "
                "give a larger --val-tokens, or prepare more text for validation"
            )
        return weights


def _checked_tokenizer(config: Config, dataset: data.Dataset) -> data.Dataset:
    """Return the dataset, with the tokenizer "unknown" if it has no dataset.json and the model has
    fewer ids than the assumed tokenizer.

    Raises:
        ConfigError: samples or evaluations need a tokenizer with more ids than the model.
    """
    name, ids, model_ids = dataset.tokenizer, dataset.vocab_size, config.model.vocab_size
    if ids <= model_ids:
        return dataset
    fewer = f"the model has {model_ids:,} ids, and the tokenizer {name} has {ids:,}"
    if config.sample_every or config.eval_every:
        assumed = "" if dataset.listed else ", which is assumed because there is no dataset.json"
        raise ConfigError(
            f"{dataset.path}: {fewer}{assumed}; set --model.vocab-size {ids}, prepare the text "
            "with another tokenizer, or train without texts: --sample-every 0 --eval-every 0"
        )
    if dataset.listed:
        return dataset
    note = f"{dataset.path} has no dataset.json, and {fewer}: the tokenizer is unknown"
    return dataclasses.replace(dataset, tokenizer="unknown", eot=None, note=note)


def _eot(config: Config, dataset: data.Dataset) -> int | None:
    eot = dataset.find_eot() if config.separate_documents else None
    if config.separate_documents and eot is None:
        raise ConfigError(
            "--separate-documents: expected documents that begin with the end-of-text token of "
            f"the tokenizer {dataset.tokenizer}, found no such token in the training shards of "
            f"{dataset.path}; prepare the text again with `python -m gptjax.data`, or leave the "
            "option out"
        )
    return eot


def _packing(config: Config, eot: int | None) -> data.Packing | None:
    return None if eot is None else data.Packing(eot, config.max_document_length)


def _stretches(timeline: Timeline, span: Span, eot: int | None) -> list[data.Stretch]:
    """Return the stretches of a run in order, up to the stage `span`; none if it shuffles."""
    if timeline.config.data_order == "shuffled":
        return []
    until = [one for one in timeline.spans if one.begin <= span.begin]
    return [
        data.Stretch(c.sequence_length, c.batch, one.end - one.begin, _packing(c, eot))
        for one in until
        for c in [one.config]
    ]


def _packed_windows(timeline: Timeline, dataset: data.Dataset, eot: int | None) -> dict[int, int]:
    """Return `Inputs.packed`; the training shards are read.

    Raises:
        ConfigError: the documents do not fill a window, or the data of a run that reads its data in
            order ends before the run.
    """
    counts, in_order = {}, timeline.config.data_order == "sequential"
    # The last stage of a run in order reads the end of the data.
    for span in timeline.spans[-1:] if in_order else timeline.spans:
        packing, length = _packing(span.config, eot), span.config.sequence_length
        packs = span.config.max_document_length is not None
        if in_order or packs and span.order not in counts:
            how = {"packing": packing, "sequential": _stretches(timeline, span, eot)}
            try:
                windows = data.Windows(dataset.train, length, **how)
            except data.ShardError as error:
                raise ConfigError(f"{timeline.name(span)}{error}") from error
            if not in_order:
                counts[span.order] = len(windows)
    return counts


def _val_batch(timeline: Timeline, dataset: data.Dataset, device_count: int) -> int:
    config = timeline.config
    length = config.sequence_length
    most = (dataset.val_tokens - 1) // length // device_count * device_count
    batch = min(config.micro_batch * device_count, most)
    if not batch:
        raise ConfigError(
            f"{dataset.path} has {dataset.val_tokens} validation tokens: too few for one sequence "
            f"of {length} on each of {device_count} devices"
        )
    return batch
