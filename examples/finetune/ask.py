"""Ask a fine-tuned model questions: python examples/finetune/ask.py runs/facts "Which …?" …"""

import argparse

import jax
import numpy as np

import gptjax

NEW_TOKENS = 32


def answer(model: gptjax.GPT2, tokenizer: gptjax.data.Tokenizer, question: str) -> str:
    """Return the likeliest answer, up to end-of-text.

    The prompt is that of the training data: end-of-text, the question, the separator.
    """
    prompt = [tokenizer.eot, *tokenizer.prefix, *tokenizer.encode(question + "\n")]
    ids = gptjax.generate(
        model,
        np.int32([prompt]),
        max_new_tokens=NEW_TOKENS,
        temperature=0,
        key=jax.random.key(0),
    )
    new = np.asarray(ids[0, len(prompt) :])
    end = np.flatnonzero(new == tokenizer.eot)
    return tokenizer.decode(new[: end[0]] if end.size else new)


def main(path: str, *questions: str) -> None:
    """Print each question and its answer."""
    try:
        model, tokenizer = gptjax.load(path)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    for question in questions:
        print(f"{question}  {answer(model, tokenizer, question)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", help="run, checkpoint or other path that gptjax.load reads")
    parser.add_argument("questions", nargs="+", help="questions as in the training data")
    options = parser.parse_args()
    main(options.path, *options.questions)
