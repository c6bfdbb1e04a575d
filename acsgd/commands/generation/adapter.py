"""An adapter directory of PEFT, put into a loaded model."""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from acsgd.adapters.export import PREFIX
from acsgd.adapters.initial import BASE_CHECKSUM, DTYPE, BaseChecksum
from acsgd.adapters.inject import modules_named, take_virtual_tokens, virtual_tokens_in_peft
from acsgd.codecs.identity import DTYPES
from acsgd.config.adapters import NAME, VirtualTokens
from acsgd.errors import InputError
from acsgd.layers.skeleton import parameter_names
from acsgd.notes import print_note
from acsgd.shards.check import first_names
from acsgd.shards.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG, blame, open_tensors, read_json_object
from acsgd.shards.hub import check_adapter, find_model
from acsgd.shards.manifest import MANIFEST


@dataclass(frozen=True)
class PEFTAdapter:
    """An adapter directory of PEFT, opened."""

    directory: Path
    config: Any
    """A PeftConfig."""
    tensors: dict[str, Tensor]
    """Parameters by their names in the file."""
    base_checksum: str | None
    """Checksum of the base model's parameters that training left unchanged; None if the directory does not record it,
    as when PEFT has written it."""
    dtype: torch.dtype | None = None
    """In which it was trained; None if the directory does not record it."""

    @classmethod
    def open(cls, directory: Path) -> PEFTAdapter:
        """Read an adapter directory. Raises ValueError if it is not one, CorruptFileError if a file is corrupt."""
        check_adapter(directory)
        config_path, path = directory / ADAPTER_CONFIG, directory / ADAPTER_WEIGHTS
        read_json_object(config_path)
        try:
            from peft import PeftConfig
        except ImportError:
            raise ValueError('--adapter needs PEFT, which is not installed; pip install "acsgd[adapters]"') from None
        with blame(config_path, "has invalid options", "write it again with the PEFT that is installed"), _quiet():
            config = PeftConfig.from_pretrained(str(directory))
        config.inference_mode = True
        with open_tensors(path) as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a dict
            recorded = file.metadata() or {}
        return cls(directory, config, tensors, recorded.get(BASE_CHECKSUM), DTYPES.get(recorded.get(DTYPE, "")))

    @classmethod
    def of_virtual_tokens(cls, directory: Path, model: PreTrainedModel, adapter: VirtualTokens) -> PEFTAdapter:
        """Take virtual tokens out of a model that was loaded with them, in place. directory: of the model."""
        parameters = [param.detach() for param in take_virtual_tokens(model)]
        tensors, config = virtual_tokens_in_peft(adapter, model.config, parameters)
        config.inference_mode = True
        return cls(directory, config, tensors, None)

    def find_base(self, option: str) -> str:
        """Return the directory of the model that it was trained on, by its name in the adapter directory.

        option: how the user gives it. Raises ValueError if it is not named or not found.
        """
        name = self.config.base_model_name_or_path
        if name is None:
            raise ValueError(f"{self.directory} does not name its base model; give that: {option}")
        try:
            return str(find_model(name, option=f"{self.directory}: base_model_name_or_path"))
        except ValueError as error:
            raise ValueError(f"{error}; or give the model that the adapter was trained on: {option}") from None

    @property
    def virtual_tokens(self) -> int:
        """Number of virtual tokens before each prompt."""
        return self.config.num_virtual_tokens if self.config.is_prompt_learning else 0

    def base_parameters(self, model: PreTrainedModel) -> frozenset[str]:
        """Return the parameters of a model that are those of the base: all but those of modules trained as a whole."""
        paths = [path for name in self.config.modules_to_save or () for path in modules_named(model, name)]
        return frozenset(key for key in parameter_names(model) if not any(key.startswith(f"{path}.") for path in paths))

    def check_base(self, directory: Path, checksum: BaseChecksum) -> None:
        """Raise ValueError if the adapter was trained on another model than that of a directory.

        checksum: of `base_parameters`.
        """
        if self.base_checksum is None:
            print_note(f"{self.directory} does not record the checksum of its base model; its shapes fit {directory}")
        elif self.base_checksum != checksum.hexdigest():
            name = self.config.base_model_name_or_path
            raise InputError(
                f"--adapter {self.directory} was trained on another base model{f', {name},' if name else ''} than "
                f"{directory} (checksums {self.base_checksum} and {checksum.hexdigest()}); give the model that it was "
                "trained on"
            )

    def resize(self, model: PreTrainedModel) -> None:
        """Give embedding and head of a model as many rows as the adapter has for them, in place.

        PEFT saves tables that had other rows in training, with all of their values. Raises ValueError if transformers
        cannot change the number, or if the adapter lacks one of the tables.
        """
        # names in a model without adapter: those in PEFT's layers around a table have one part more
        tables = {LAYER.sub("", name.removeprefix(PREFIX)): tensor for name, tensor in self.tensors.items()}
        before = {name: param.shape for name, param in model.named_parameters()}
        embedding = model.get_input_embeddings().get_parameter("weight")
        names = next(names for key, names in parameter_names(model).items() if model.get_parameter(key) is embedding)
        rows = next((len(tables[name]) for name in names if name in tables), len(embedding))
        if rows == len(embedding):
            return
        with blame(self.directory, f"has a table of {rows} rows, which transformers cannot give the model", _ADVICE):
            model.resize_token_embeddings(rows, mean_resizing=False)
        for key, names in parameter_names(model).items():
            if model.get_parameter(key).shape != before[key] and not tables.keys() & {*names}:
                raise ValueError(
                    f"{self.directory} has {rows} rows of the embedding, but not of {key}, which training had resized, "
                    "too; give the resized model as the one it was trained on: save it by save_pretrained before "
                    "get_peft_model"
                )

    def apply(self, model: PreTrainedModel) -> PreTrainedModel:
        """Put the adapter into a model, in place, and return the model to call.

        Raises ValueError if names or shapes of its parameters do not fit the model.
        """
        from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

        with blame(self.directory / ADAPTER_CONFIG, f"does not fit {type(model).__name__}", _ADVICE), _quiet():
            adapted: Any = get_peft_model(model, self.config, adapter_name=NAME)
        expected = get_peft_model_state_dict(adapted, adapter_name=NAME, save_embedding_layers=False)
        # PEFT also saves tables that were resized or are targets, with all that is in them, and replaces the base's
        tables = {name.replace(f".{NAME}", ""): tensor for name, tensor in adapted.state_dict().items()}
        expected |= {name: tables[name] for name in self.tensors.keys() - expected.keys() if name in tables}
        differing = [
            name
            for name in sorted({*expected, *self.tensors})
            if name not in expected or name not in self.tensors or expected[name].shape != self.tensors[name].shape
        ]
        if differing:
            raise ValueError(
                f"{self.directory / ADAPTER_WEIGHTS} does not fit {type(model).__name__}: names or shapes of "
                f"{len(differing)} parameters differ, {first_names(differing)}; {_ADVICE}"
            )
        set_peft_model_state_dict(adapted, dict(self.tensors), adapter_name=NAME)
        adapted.requires_grad_(False)
        called: PreTrainedModel = adapted if self.config.is_prompt_learning else adapted.get_base_model()
        return called

    def describe(self) -> str:
        """Return a clause on the adapter."""
        count = sum(tensor.numel() for tensor in self.tensors.values())
        return f"with the {self.config.peft_type.value} adapter {self.directory}, {count:,} parameters"


LAYER = re.compile(r"(?<=\.)(token_adapter\.)?base_layer\.|(?<=\.)original_module\.")
"""Parts of the names of a table by which a layer of PEFT around it has it."""
_ADVICE = "give the model that it was trained on"


def is_adapter(directory: Path) -> bool:
    """Whether a directory is an adapter directory of PEFT, and no model."""
    has_model = any(os.path.lexists(directory / name) for name in (MANIFEST, CONFIG))
    return os.path.lexists(directory / ADAPTER_CONFIG) and not has_model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Context without warnings of PEFT on options that other versions have, and that it corrects itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
