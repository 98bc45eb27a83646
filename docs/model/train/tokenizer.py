"""Make the tokenizer: byte-level BPE with Qwen3.5's pre-tokenizer, trained on the project's text.

    python -m train.tokenizer --out DIR

Names are left blank in that text, and the syllables of made-up names are added often enough to be
the first merges, each in lower case and capitalised. So a name is cut into the same pieces wherever
it stands, which is what copying needs. Latin letters with accents become single tokens; everything
else beyond ASCII is spelled in bytes, all 256 of which are in the vocabulary.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from . import data
from .words import ACCENTED, Words, capital, syllables

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DOCUMENTS = 15_000
REPEATS = 40_000
VOCAB = 1536


def training_text() -> Iterator[str]:
    """Texts of the mix without names, then the syllables and accented letters."""
    words = Words(random.Random("tokenizer"), blank=True)
    for _ in range(DOCUMENTS):
        made = data.document(words, 0.0)
        if made.text:
            yield made.text
        for tool in made.tools:
            yield json.dumps(tool)
        for message in made.messages:
            yield str(message["content"]) + data.call_text(message)
    for syllable in syllables():
        yield "\n".join([syllable] * REPEATS)
        yield "\n".join([capital(syllable)] * REPEATS)
    for letter in ACCENTED:
        yield "\n".join([letter] * REPEATS)


def build(vocab: int) -> Tokenizer:
    """Train the tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(SPECIAL) - len(MARKS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(), trainer)
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    tokenizer.add_tokens([AddedToken(s, special=False, normalized=False) for s in MARKS])
    return tokenizer


def save(tokenizer: Tokenizer, out: Path) -> None:
    """Write the tokenizer's three files."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": 4096,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    template = Path(__file__).with_name("chat_template.jinja").read_text()
    (out / "chat_template.jinja").write_text(template)


def report(tokenizer: Tokenizer) -> None:
    """Print the size and how texts are cut."""
    rng = random.Random("report")
    for label, share in (("short", 0.0), ("long", 1.0)):
        texts = [data.render(data.document(Words(rng), share)) for _ in range(1000)]
        lengths = sorted(len(tokenizer.encode(text).ids) for text in texts)
        print(
            f"{label} documents: mean {sum(lengths) / 1000:.0f} tokens, median {lengths[500]}, "
            f"95 % below {lengths[950]}, {sum(map(len, texts)) / sum(lengths):.2f} characters each"
        )
    print("vocabulary", tokenizer.get_vocab_size())
    for text in (" Kavo lives in Jolinar.", '{"name": "Kavo"}', " Zoë", "汉字", "🚀"):
        print(tokenizer.encode(text).tokens)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab", type=int, default=VOCAB)
    args = parser.parse_args()
    tokenizer = build(args.vocab)
    save(tokenizer, args.out)
    report(tokenizer)


if __name__ == "__main__":
    main()
