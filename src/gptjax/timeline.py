"""Stages of a run: batch, sequence length, learning rate and model that change at given steps.

Steps are indices of updates, 0 for the first. A run without stages is one stage.

Data. A sequence length and a maximum document length define the training windows
(`gptjax.data.loader`). A stage with the same two lengths as the previous stage continues in the
same order of windows, with another batch. A stage that changes a length begins a new order of all
windows, and may read text of an earlier stage again. The first order equals that of a run without
stages. With the data order "sequential", each stage begins where the previous one ended.
"""

import dataclasses

from gptjax.config import Config


@dataclasses.dataclass(frozen=True)
class Span:
    """The steps begin … end − 1 of a run.

    Attributes:
        number: number of the stage, 1 for the first.
        config: the run's config with the options of the stage, and without stages.
        order: number of the order of windows that the stage reads, 0 for the first.
        position: windows of this order that earlier stages consumed.
        tokens: tokens that earlier stages consumed.
    """

    number: int
    begin: int
    end: int
    config: Config
    order: int = 0
    position: int = 0
    tokens: int = 0


class Timeline:
    """The stages of a run that begin before max_steps.

    Attributes:
        config: the run's config.
        spans: at least one, in order.
        total: number of stages in the config, including those that are not reached; at least 1.
    """

    def __init__(self, config: Config):
        self.config = config
        self.total = max(len(config.stages), 1)
        first = Span(1, 0, config.max_steps, config)
        self.spans = [first] if not config.stages else []
        begin = order = position = tokens = 0
        lengths = None  # the options that define the training windows
        for number, stage in enumerate(config.stages, start=1):
            if begin >= config.max_steps:
                break
            own = config.of_stage(number)
            before, lengths = lengths, (own.sequence_length, own.max_document_length)
            if self.spans and (config.data_order == "sequential" or lengths != before):
                order, position = order + 1, 0
            end = min(stage.until or config.max_steps, config.max_steps)
            self.spans.append(Span(number, begin, end, own, order, position, tokens))
            position += (end - begin) * own.batch
            tokens += (end - begin) * own.batch_tokens
            begin = end

    def at(self, step: int) -> Span:
        """Return the stage of the update with index `step`; the last stage for any later step."""
        return next(span for span in reversed(self.spans) if span.begin <= step)

    def name(self, span: Span) -> str:
        """Return "stage 2 of 3: ", which begins a message; "" in a run without stages."""
        return f"stage {span.number} of {self.total}: " if self.total > 1 else ""

    def tokens(self, step: int) -> int:
        """Return the number of tokens in the first `step` steps."""
        span = self.at(step)
        return span.tokens + (step - span.begin) * span.config.batch_tokens

    def position(self, step: int) -> int:
        """Return the number of windows that the steps before `step` consumed in its order."""
        span = self.at(step)
        return span.position + (step - span.begin) * span.config.batch
