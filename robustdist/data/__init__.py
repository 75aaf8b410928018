"""LightningDataModules over real images and sentences that arrive with packages; nothing is downloaded."""

from robustdist.data.base import ImageDataModule, Parts, stratified_split
from robustdist.data.digits import DigitsDataModule
from robustdist.data.fashion_mnist import FashionMNISTDataModule
from robustdist.data.mnist5k import MNIST5kDataModule
from robustdist.data.photo_patches import PhotoPatchesDataModule
from robustdist.data.unlabeled import UnlabeledMix
from robustdist.data.vader import VADERDataModule

__all__ = [
    "DigitsDataModule",
    "FashionMNISTDataModule",
    "ImageDataModule",
    "MNIST5kDataModule",
    "Parts",
    "PhotoPatchesDataModule",
    "UnlabeledMix",
    "VADERDataModule",
    "stratified_split",
]
