"""The embedded images and sounds, drawn by formulas: nobody's picture, nobody's voice.

Command:  python scripts/samples.py [FOLDER]         (default: headprobe/data)
Input:    none; Pillow
Output:   FOLDER/image-*.png (96 x 96, RGB) and FOLDER/sound-*.wav (16 kHz, mono, 16 bit)
Time:     a second
"""

import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw
from scipy.io import wavfile
from scipy.signal import chirp, lfilter

SIZE = 96
RATE = 16_000


# --- images ---


def shapes() -> Image.Image:
    """A red disc, a green square and a blue triangle on white."""
    image = Image.new("RGB", (SIZE, SIZE), "white")
    draw = ImageDraw.Draw(image)
    draw.ellipse((8, 8, 44, 44), fill=(200, 40, 40))
    draw.rectangle((54, 12, 86, 44), fill=(40, 150, 60))
    draw.polygon(((48, 54), (84, 88), (12, 88)), fill=(40, 70, 190))
    return image


def gradient() -> Image.Image:
    """Red grows to the right, green downwards, blue towards the middle."""
    y, x = np.mgrid[:SIZE, :SIZE] / (SIZE - 1)
    middle = 1 - np.hypot(x - 0.5, y - 0.5) * np.sqrt(2)
    return picture(np.stack([x, y, middle], axis=-1))


def checkers() -> Image.Image:
    """A chequered board."""
    y, x = np.mgrid[:SIZE, :SIZE] // 12
    return picture(np.repeat(((x + y) % 2)[..., None] * 0.9 + 0.05, 3, axis=-1))


def stripes() -> Image.Image:
    """Stripes that lean, in two colours."""
    y, x = np.mgrid[:SIZE, :SIZE]
    wave = (np.sin((x + 0.6 * y) / 4) > 0)[..., None]
    return picture(np.where(wave, (0.95, 0.75, 0.2), (0.2, 0.2, 0.45)))


def rings() -> Image.Image:
    """Rings around a point off the middle."""
    y, x = np.mgrid[:SIZE, :SIZE]
    wave = 0.5 + 0.5 * np.cos(np.hypot(x - 36, y - 56) / 3)
    return picture(np.stack([wave, 0.6 * wave + 0.2, 1 - wave], axis=-1))


def grain() -> Image.Image:
    """A coarse texture: squares of seeded noise."""
    noise = np.random.default_rng(0).random((24, 24, 3))
    return picture(noise.repeat(4, axis=0).repeat(4, axis=1) * 0.6 + 0.2)


def face() -> Image.Image:
    """A face of circles and an arc."""
    image = Image.new("RGB", (SIZE, SIZE), (150, 195, 235))
    draw = ImageDraw.Draw(image)
    draw.ellipse((18, 12, 78, 84), fill=(240, 205, 170), outline=(90, 60, 40), width=2)
    for left in (32, 56):
        draw.ellipse((left, 36, left + 9, 45), fill="white", outline=(60, 60, 60))
        draw.ellipse((left + 3, 39, left + 7, 43), fill=(40, 40, 40))
    draw.polygon(((48, 46), (43, 58), (52, 58)), fill=(220, 175, 140))
    draw.arc((34, 50, 62, 74), 20, 160, fill=(170, 50, 60), width=3)
    return image


def landscape() -> Image.Image:
    """A sky, a sun, hills and a house."""
    image = Image.new("RGB", (SIZE, SIZE))
    draw = ImageDraw.Draw(image)
    for row in range(SIZE):
        draw.line((0, row, SIZE, row), fill=(120 + row, 170 + row // 2, 230))
    draw.ellipse((66, 8, 86, 28), fill=(255, 225, 90))
    draw.ellipse((-30, 56, 70, 150), fill=(70, 130, 60))
    draw.ellipse((36, 64, 140, 160), fill=(50, 105, 50))
    draw.rectangle((28, 48, 50, 66), fill=(190, 150, 110))
    draw.polygon(((24, 48), (54, 48), (39, 36)), fill=(150, 50, 40))
    return image


def picture(values: np.ndarray) -> Image.Image:
    """An image of numbers from 0 to 1."""
    return Image.fromarray((np.clip(values, 0, 1) * 255).round().astype(np.uint8))


# --- sounds ---


def seconds(length: float) -> np.ndarray:
    """The times of the samples."""
    return np.arange(int(length * RATE)) / RATE


def tones() -> np.ndarray:
    """Three tones after one another, of 220, 330 and 440 Hz."""
    time = seconds(0.5)
    fade = np.minimum(1, np.minimum(time, time[::-1]) / 0.02)
    parts = [fade * np.sin(2 * np.pi * pitch * time) for pitch in (220, 330, 440)]
    return 0.5 * np.concatenate(parts)


def glide() -> np.ndarray:
    """A tone that rises from 100 to 4000 Hz."""
    time = seconds(1.2)
    return 0.5 * chirp(time, f0=100, t1=time[-1], f1=4000, method="logarithmic")


def bursts() -> np.ndarray:
    """Four bursts of noise, each shorter than the one before."""
    noise = np.random.default_rng(0).standard_normal(int(1.6 * RATE))
    time = seconds(1.6)
    since = time % 0.4
    return 0.15 * noise * np.exp(-since * (10 + 40 * (time // 0.4)))


def vowels() -> np.ndarray:
    """Pulses through the resonances of a, i and u, as a throat and a mouth shape them."""
    resonances = ((730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240))
    parts = []
    for frequencies in resonances:
        time = seconds(0.6)
        pitch = 120 + 15 * np.sin(2 * np.pi * 1.5 * time)
        sound = np.diff(np.floor(np.cumsum(pitch / RATE)), prepend=0.0)
        for frequency in frequencies:
            radius, angle = np.exp(-np.pi * 90 / RATE), 2 * np.pi * frequency / RATE
            sound = lfilter([1 - radius], [1, -2 * radius * np.cos(angle), radius**2], sound)
        fade = np.minimum(1, np.minimum(time, time[::-1]) / 0.05)
        parts.append(fade * sound / np.abs(sound).max())
    return 0.6 * np.concatenate(parts)


IMAGES = (shapes, gradient, checkers, stripes, rings, grain, face, landscape)
SOUNDS = (tones, glide, bursts, vowels)


def main(folder: Path) -> None:
    """Draw all of them."""
    for draw in IMAGES:
        draw().save(folder / f"image-{draw.__name__}.png", optimize=True)
    for make in SOUNDS:
        samples = np.clip(make(), -1, 1) * (2**15 - 1)
        wavfile.write(folder / f"sound-{make.__name__}.wav", RATE, samples.round().astype(np.int16))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "headprobe/data"))
