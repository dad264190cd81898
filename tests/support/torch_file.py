"""Writes files as torch.save() does: an archive of a pickle (protocol 2), and of a file for each tensor."""
import math
import struct
import typing
import zipfile

CODES = {"FloatStorage": "f", "LongStorage": "q"}


class Tensor(typing.NamedTuple):
    shape: typing.Sequence[int]
    values: typing.Sequence[float]
    storage: str = "FloatStorage"
    device: str = "cpu"


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def integer(value):
    return bytes((0x4B, value)) if 0 <= value < 256 else b"J" + struct.pack("<i", value)


def integers(values):
    return b"(" + b"".join(map(integer, values)) + b"t"


def write_torch_file(path, members):
    """`members`: integers, floats, None, tensors, and dicts of these, by name."""
    data = []  # of tensors
    ordered = b"ccollections\nOrderedDict\n)R"

    def pickled(value):
        if value is None:
            return b"N"
        if isinstance(value, Tensor):
            strides = [math.prod(value.shape[axis + 1:]) for axis in range(len(value.shape))]
            storage = (b"(" + text("storage") + f"ctorch\n{value.storage}\n".encode() + text(str(len(data))) + text(value.device)
                       + integer(len(value.values)) + b"tQ")
            data.append(struct.pack(f"<{len(value.values)}{CODES[value.storage]}", *value.values))
            return (b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + integer(0) + integers(value.shape) + integers(strides)
                    + b"\x89" + ordered + b"tR")
        if isinstance(value, dict):
            return ordered + items(value)
        return b"G" + struct.pack(">d", value) if isinstance(value, float) else integer(value)

    def items(values):
        return b"(" + b"".join(text(name) + pickled(value) for name, value in values.items()) + b"u"

    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02}" + items(members) + b".")
        for i, values in enumerate(data):
            archive.writestr(f"archive/data/{i}", values)
        archive.writestr("archive/version", "3\n")
