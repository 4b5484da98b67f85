import numpy as np
import pytest
from PIL import Image

from perdure.core.errors import UserError
from perdure.core.rng import Rng
from perdure.data.load import load_domains, load_source
from perdure.data.sources.image_folder import FolderData

DRAWS = Rng(0)


def pixels(seed, size=(5, 7), color=True):
    shape = (size[1], size[0], 3) if color else (size[1], size[0])
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def save(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)


def fill(root, classes=("cat", "dog"), each=5, **options):
    for k, name in enumerate(classes):
        for i in range(each):
            save(root / name / f"{i}.png", pixels(10 * k + i, **options))


def config(path, **options):
    return FolderData(path=str(path), **options)


def refused(settings, *words, load=load_source):
    with pytest.raises(UserError) as caught:
        load(settings, DRAWS)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_folder_is_a_class(tmp_path):
    fill(tmp_path)
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    (tmp_path / ".hidden").mkdir()
    source = load_source(config(tmp_path), DRAWS)
    assert source.class_names == ("cat", "dog")
    assert source.shape == (3, 7, 5)
    assert (len(source.train), len(source.test)) == (8, 2)
    assert sorted(source.test.y.tolist()) == [0, 1]
    wanted = {bytes(pixels(10 * k + i).transpose(2, 0, 1)): k for k in (0, 1) for i in range(5)}
    for part in (source.train, source.test):
        for x, y in zip(part.x.numpy(), part.y.tolist(), strict=True):
            assert wanted[x.tobytes()] == y


def test_train_and_test_folders_are_the_splits(tmp_path):
    fill(tmp_path / "train", each=3)
    fill(tmp_path / "test", each=2)
    source = load_source(config(tmp_path), DRAWS)
    assert source.train.y.tolist() == [0, 0, 0, 1, 1, 1]
    assert source.test.y.tolist() == [0, 0, 1, 1]
    assert np.array_equal(source.test.x[3].numpy(), pixels(11).transpose(2, 0, 1))


def test_gray_stays_gray_and_among_color_becomes_color(tmp_path):
    fill(tmp_path, color=False)
    assert load_source(config(tmp_path), DRAWS).shape == (1, 7, 5)
    save(tmp_path / "cat" / "9.png", pixels(9))
    source = load_source(config(tmp_path), DRAWS)
    assert source.shape == (3, 7, 5)
    assert load_source(config(tmp_path, channels=1), DRAWS).shape == (1, 7, 5)


def test_sixteen_bits_keep_their_high_byte(tmp_path):
    deep = np.full((7, 5), 0x80FF, np.uint16)
    for i in range(2):
        save(tmp_path / "a" / f"{i}.png", deep)
    source = load_source(config(tmp_path), DRAWS)
    assert source.shape == (1, 7, 5)
    assert source.train.x.unique().tolist() == [0x80]


def test_mixed_sizes_need_a_size(tmp_path):
    fill(tmp_path)
    save(tmp_path / "cat" / "odd.png", np.full((10, 20, 3), 77, np.uint8))
    refused(config(tmp_path), "data.size", "odd.png", "20x10", "5x7")
    source = load_source(config(tmp_path, size=6), DRAWS)
    assert source.shape == (3, 6, 6)
    every = [*source.train.x, *source.test.x]
    assert sum(bool((x == 77).all()) for x in every) == 1


def test_invalid_folders_are_refused(tmp_path):
    refused(config(tmp_path / "none"), "data.path", "none", "exists")
    (tmp_path / "empty" / "cat").mkdir(parents=True)
    refused(config(tmp_path / "empty"), "data.path", "images")
    fill(tmp_path / "one", each=1)
    refused(config(tmp_path / "one"), "data.path", "two images")
    fill(tmp_path / "domains" / "photo")
    refused(config(tmp_path / "domains"), "data.path", "stream.kind domains")


@pytest.mark.parametrize("kind", ["text", "truncated", "empty"])
def test_a_corrupt_image_is_named(tmp_path, kind):
    fill(tmp_path)
    path = tmp_path / "dog" / "3.png"
    data = path.read_bytes()
    path.write_bytes({"text": b"hello", "truncated": data[: len(data) // 2], "empty": b""}[kind])
    refused(config(tmp_path), "data.path", "3.png")


def test_domains_share_their_classes(tmp_path):
    fill(tmp_path / "photo", ("cat", "dog", "hen"))
    fill(tmp_path / "sketch" / "train", ("cat", "hen"), size=(4, 4))
    fill(tmp_path / "sketch" / "test", ("cat", "hen"), size=(4, 4))
    photo, sketch = load_domains(config(tmp_path), DRAWS)
    assert (photo.name, sketch.name) == ("photo", "sketch")
    assert photo.class_names == sketch.class_names == ("cat", "dog", "hen")
    assert sketch.train.y.unique().tolist() == [0, 2]
    assert sketch.shape == (3, 4, 4)
    (tmp_path / "nothing").mkdir()
    refused(config(tmp_path / "nothing"), "domain/class", load=load_domains)
