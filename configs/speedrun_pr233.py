"""The modded-nanogpt speedrun's record of pull request #233 (February 2026): 1,490 steps.

Command:   python train.py --config configs/speedrun_pr233.py
Data:      FineWeb: python -m gptjax.data fineweb10B --shards 9. The run reads 395.8 M tokens:
           documents in order, each once, truncated.
Hardware:  eight H100 or H200, one sequence on each at a time. Fewer GPUs accumulate gradients.
Time:      not run here. The authors of modded-nanogpt: 88.83 s of training on 8×H100, mean of four
           runs.
Loss:      not run here. The authors of modded-nanogpt: a validation loss of 3.2788, mean of four
           runs, on the first 10,485,760 validation tokens. This config validates on as many tokens,
           evenly spaced over the split.

The vocabulary contains the 47 columns that pad GPT-2's to 50,304: the record's softmax covers them.
docs/speedrun.md lists the differences from the record.
"""

from dataclasses import replace

from gptjax.config import Config, Stage
from gptjax.models.speedrun import PRESETS
from gptjax.models.speedrun import Stage as ModelStage
from gptjax.optim import NorMuonConfig
from gptjax.precision import Precision

WINDOWS = ((1, 3), (3, 7), (5, 11), (6, 13))
"""(short window, long window) of each stage, in units of 128 tokens."""
TOKEN_WEIGHTS = ((1.0, 0.5, 0.25), (1.0, 0.5), (1.0,), (1.0,))
"""Weights of the next tokens in the loss, by stage. In each stage with several weights, the last
weight decreases to 0 during the stage."""
LEARNING_RATE_FACTORS = (1.0, 1.52, 1.73, 1.0)


def stages(
    until: tuple[int, ...],
    batch_tokens: tuple[int, ...],
    sequence_length: tuple[int, ...],
    max_document_length: tuple[int | None, ...],
    untied_from: int,
) -> tuple[Stage, ...]:
    """Return the stages. Each argument except the last has one value per stage of the record.

    Args:
        untied_from: step from which the embedding is not the transposed head. The stage that
            contains this step is split at this step.
    """
    result, begin = [], 0
    for i, end in enumerate(until):
        weights, decreasing = TOKEN_WEIGHTS[i], len(TOKEN_WEIGHTS[i]) > 1
        model = ModelStage(
            short_window=128 * WINDOWS[i][0],
            long_window=128 * WINDOWS[i][1],
            rotary_windows=tuple(128 * long for _, long in WINDOWS[: i + 1]),
            token_weights=weights,
            final_token_weights=(*weights[:-1], 0.0) if decreasing else None,
            steps=(begin, end),
            evaluation_window=20 * 128 if i == len(until) - 1 else None,
        )
        for last in (untied_from, end):
            if begin < last <= end:
                stage = Stage(
                    until=last,
                    batch_tokens=batch_tokens[i],
                    sequence_length=sequence_length[i],
                    max_document_length=max_document_length[i],
                    learning_rate_factor=LEARNING_RATE_FACTORS[i],
                    model={"stage": model._replace(tied=last <= untied_from)},
                )
                result.append(stage)
                begin = last
    return tuple(result)


config = Config(
    name="speedrun_pr233",
    model=replace(PRESETS["speedrun"], vocab_size=50_304, precision=Precision("bf16")),
    optimizer=NorMuonConfig(
        matrix_learning_rate=0.023,
        learning_rate=0.008,
        schedule="linear",
        warmup_steps=0,
        cooldown_steps=870,  # from step 580 to step 1450
        final_steps=40,
        final_fraction=0.15,
        momentum_warmup_steps=300,
        momentum_cooldown_steps=50,
        matrix_weight_decay=1.2,
        matrix_decay_form="lr_squared",
        weight_decay=0.005,
        decay_form="lr_squared",
        cautious_decay=True,
        adam_every=2,
        eps=1e-10,
        clip_norm=None,
        param_storage="bf16_mantissa",
    ),
    dataset="fineweb10B",
    data_order="sequential",
    loss_reduction="sequence_sum",
    separate_documents=True,
    batch_tokens=2_097_152,  # of validation, as the next line
    sequence_length=262_144,
    micro_batch=1,
    max_steps=1_490,
    stages=stages(
        until=(483, 967, 1_450, 1_490),
        batch_tokens=(131_072, 262_144, 393_216, 393_216),
        sequence_length=(16_384, 32_768, 49_152, 49_152),
        max_document_length=(896, 2_048, 2_048, 2_048),
        untied_from=968,  # after AdamW's step with index 967
    ),
    val_every=250,
    val_tokens=10_485_760,
    sample_every=0,
    checkpoint_every=0,
)
