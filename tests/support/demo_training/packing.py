"""The demo model's corpus as tensors: packed rows of ids, with marks on those that are learned."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from demo_training.corpus import Document, documents
from demo_training.tokenizer import END_OF_TEXT, THINK, TURN_END, TURN_START, Codec

STEP_TOKENS, ROW_LENS = 2048, (256, 512)
NO_LOSS = -100

Encoded = tuple[list[int], list[int]]  # ids and labels of a document


@dataclass(slots=True)
class Batch:
    """Rows of whole documents, packed one after the other."""

    ids: Tensor  # [rows, row_len]
    labels: Tensor  # [rows, row_len]: the id itself where it is to be learned, else NO_LOSS
    positions: Tensor  # [rows, row_len]: starts at 0 in every document
    documents: Tensor  # [rows, row_len]: the number of the document in its row, -1 for padding

    def attention_mask(self) -> Tensor:
        """A mask that is true where a token may look: backwards, and in its own document only."""
        row_len = self.ids.shape[1]
        causal = torch.ones(row_len, row_len, dtype=torch.bool).tril()
        same = self.documents[:, :, None] == self.documents[:, None, :]  # [rows, row_len, row_len]
        return (same & causal)[:, None]  # [rows, 1, row_len, row_len]


class Encoder:
    """An encoder of documents to ids and labels; of a conversation only the assistant's turns are learned."""

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self.header = codec.encode(f"{TURN_START}assistant\n")
        self.opening = codec.encode(f"{THINK}\n")
        self.turn_end = codec.id_of(TURN_END)

    def encode(self, document: Document) -> Encoded:
        if not document.messages:
            return self._encode_pieces([*document.pieces, ("", END_OF_TEXT)])
        ids = self.codec.encode_chat(document.messages, document.tools, answer_next=False)
        labels = [NO_LOSS] * len(ids)
        for start in range(len(ids)):
            if ids[start : start + len(self.header)] == self.header:
                begin = start + len(self.header)
                end = ids.index(self.turn_end, begin) + 1
                if ids[begin : begin + len(self.opening)] == self.opening:
                    begin += len(self.opening)  # the template opens the reasoning, not the model
                labels[begin:end] = ids[begin:end]
        return ids, labels

    def _encode_pieces(self, pieces: list[tuple[str, str]]) -> Encoded:
        ids: list[int] = []
        labels: list[int] = []
        for given, learned in pieces:
            before, after = self.codec.encode(given), self.codec.encode(learned)
            ids += before + after
            labels += [NO_LOSS] * len(before) + after
        return ids, labels


class Packer:
    """A packer gathers documents until one does not fit any more."""

    def __init__(self, row_len: int) -> None:
        self.row_len = row_len
        self._rows: list[list[Encoded]] = [[] for _ in range(STEP_TOKENS // row_len)]

    def add(self, document: Encoded) -> Batch | None:
        """Add a document. If there was no room for it, return the batch that is full."""
        size, full = len(document[0]), None
        room = [row for row in self._rows if sum(len(ids) for ids, _ in row) + size <= self.row_len]
        if not room:
            full = self._pack()
            self._rows = room = [[] for _ in self._rows]
        room[0].append(document)
        return full

    def _pack(self) -> Batch:
        shape = (len(self._rows), self.row_len)
        batch = Batch(
            ids=torch.zeros(shape, dtype=torch.long),
            labels=torch.full(shape, NO_LOSS),
            positions=torch.zeros(shape, dtype=torch.long),
            documents=torch.full(shape, -1),
        )
        for row, documents_of_row in enumerate(self._rows):
            start = 0
            for number, (ids, labels) in enumerate(documents_of_row):
                place = slice(start, start + len(ids))
                batch.ids[row, place] = torch.tensor(ids)
                batch.labels[row, place] = torch.tensor(labels)
                batch.positions[row, place] = torch.arange(len(ids))
                batch.documents[row, place] = number
                start += len(ids)
        return batch


def batches(encoder: Encoder, seed: int) -> Iterator[Batch]:
    return packed(encoder, documents(seed))


def packed(encoder: Encoder, source: Iterable[Document]) -> Iterator[Batch]:
    """Pack short documents apart from long ones, since attention over long rows costs most."""
    packers = [Packer(row_len) for row_len in ROW_LENS]
    for document in source:
        encoded = encoder.encode(document)
        fitting = [packer for packer in packers if len(encoded[0]) <= packer.row_len]
        if fitting and (batch := fitting[0].add(encoded)) is not None:
            yield batch
