"""Errors keep their type across processes and HTTP."""

import pickle

import pytest

from opentinker import errors


@pytest.mark.parametrize("cls", list(errors._tree(errors.OpenTinkerError).values()))
def test_every_error_survives_pickling_and_a_problem_document(cls: type[errors.OpenTinkerError]) -> None:
    error = cls("what", hint="do this")
    for copy in (pickle.loads(pickle.dumps(error)), errors.from_problem(error.to_problem())):
        assert type(copy) is cls
        assert str(copy) == "what (do this)"


def test_an_unknown_code_keeps_its_text_and_code() -> None:
    error = errors.from_problem({"code": "from_the_future", "detail": "x"})
    assert (type(error), error.code, error.detail) == (errors.OpenTinkerError, "from_the_future", "x")


def test_a_class_that_somebody_derives_does_not_take_over_the_code() -> None:
    class Mixture(errors.NotFoundError):
        def __init__(self) -> None:
            super().__init__("a mixture")

    assert type(errors.from_problem({"code": errors.NotFoundError.code, "detail": "gone"})) is errors.NotFoundError
