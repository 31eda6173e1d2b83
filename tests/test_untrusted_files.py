"""Archives and HDF5 files that would fill the memory, or that lead elsewhere."""

import zipfile

import numpy as np
import pytest

from keras_lso.compat import untrusted_files
from keras_lso.compat.untrusted_files import (
    hard_group,
    read_dataset,
    read_datasets,
    refuse_bombs,
)

h5py = pytest.importorskip("h5py")


@pytest.fixture
def file(tmp_path):
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["group/secret"] = np.float32(42)
    with h5py.File(tmp_path / "file.h5", "w") as file:
        file["group/inner/value"] = np.float32([1, 2])
        file["soft"] = h5py.SoftLink("/group")
        file["external"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "/group")
        file["group/soft"] = h5py.SoftLink("/group/inner/value")
        file["group/external"] = h5py.ExternalLink(
            str(tmp_path / "other.h5"), "/group/secret"
        )
        file["group"].create_dataset(
            "bytes", (1,), "uint8", external=[(str(tmp_path / "other.h5"), 0, 1)]
        )
        layout = h5py.VirtualLayout((), "float32")
        layout[()] = h5py.VirtualSource(tmp_path / "other.h5", "group/secret", ())
        file["group"].create_virtual_dataset("virtual", layout)
        # It takes a few hundred bytes.
        file["group"].create_dataset(
            "bomb", (2**20, 2**10), "float32", chunks=(2**10, 2**10)
        )
        yield file


def test_read_dataset_returns_array_stored_in_file(file):
    group = hard_group(file, "group/inner")
    assert read_dataset(group, "value").tolist() == [1, 2]
    assert read_dataset(file, "group/inner/value").tolist() == [1, 2]


@pytest.mark.parametrize("path", ["missing", "soft", "external", "group/inner/value"])
def test_hard_group_returns_none_unless_group_is_in_file(path, file):
    assert hard_group(file, path) is None
    assert hard_group(file, f"{path}/inner") is None


@pytest.mark.parametrize("name", ["soft", "external", "bytes", "virtual", "inner"])
def test_read_dataset_rejects_links_and_external_data(name, file):
    # h5py itself would read the other file.
    assert np.asarray(file["group"][name]).size >= 1
    with pytest.raises(ValueError, match=f"'{name}'.*in the file itself"):
        read_dataset(file["group"], name)


def test_read_dataset_error_names_missing_dataset(file):
    with pytest.raises(ValueError, match="damaged.*'inner/values'"):
        read_dataset(file["group"], "inner/values")


def test_read_dataset_rejects_huge_dataset_without_stored_data(file):
    with pytest.raises(ValueError, match="'bomb' takes 0 bytes.*4294967296"):
        read_dataset(file["group"], "bomb")


def test_refuse_bombs_rejects_only_decompression_bombs(tmp_path, monkeypatch):
    monkeypatch.setattr(untrusted_files, "_LARGE", 2**20)
    path = tmp_path / "archive.zip"
    for compression, size in (
        (zipfile.ZIP_STORED, 2**21),
        (zipfile.ZIP_DEFLATED, 2**19),
    ):
        with zipfile.ZipFile(path, "w", compression) as archive:
            archive.writestr("zeros", bytes(size))
        with zipfile.ZipFile(path) as archive:
            refuse_bombs(archive)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(2**21))
    with zipfile.ZipFile(path) as archive, pytest.raises(ValueError, match="'zeros'"):
        refuse_bombs(archive)


def test_read_datasets_rejects_same_array_under_several_names(file):
    """A file of 8 MB with 300 names for one array took 2.4 GB."""
    group = file["group/inner"]
    group["other"] = np.float32([3])
    assert [a.tolist() for a in read_datasets(group, ["value", "other"])] == [
        [1, 2],
        [3],
    ]
    group["again"] = group["value"]
    for names in (["value", "again"], ["value", "other", "value"]):
        with pytest.raises(ValueError, match=f"one array as '{names[-1]}'"):
            read_datasets(group, names)
