"""The tokenizer as training needs it."""

from pathlib import Path

from tokenizers import Tokenizer

from . import data


class Encoder:
    """The tokenizer with the ids that training needs."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.vocab = self.tokenizer.get_vocab_size()
        self.stop = self.ids(data.STOP)[0]
        self.end = self.ids(data.END)[0]
        self.generate = self.ids(data.GENERATE)

    def ids(self, text: str) -> list[int]:
        """Token ids of a text; special tokens are recognised."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def batch(self, texts: list[str]) -> list[list[int]]:
        """Token ids of many texts."""
        return [list(e.ids) for e in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def weights(self, ids: list[int], prompt: float) -> list[float]:
        """Weight of each token as a target: one in the model's turns, `prompt` elsewhere."""
        found = [prompt] * len(ids)
        head = self.generate
        inside = False
        at = 0
        while at < len(ids):
            if not inside and ids[at] == head[0] and ids[at : at + len(head)] == head:
                inside = True
                at += len(head)
                continue
            if inside:
                found[at] = 1.0
                inside = ids[at] != self.end
            at += 1
        return found


Row = tuple[list[int], list[float]]
