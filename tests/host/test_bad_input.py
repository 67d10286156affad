"""Bad input gets a typed error that names the number that is wrong, from every implementation alike."""

import numpy as np
import pytest
from bad_input import BAD_CALLS

from numba_psa import NumbaPSAError, implementation


@pytest.mark.parametrize("impl", ["oracle", "cpu"])
@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_input_is_refused(case, impl):
    name, arguments, keywords, error, message = BAD_CALLS[case]
    with pytest.raises(error, match=message) as caught:
        getattr(implementation(impl), name)(*arguments, **keywords)
    assert isinstance(caught.value, NumbaPSAError)


def test_nothing_is_half_written():
    d_qkv = np.ones((2, 48, 3, 2), np.float32)
    with pytest.raises(NumbaPSAError):
        implementation("oracle").psa_extract_v_backward(np.ones((2, 24, 2, 2), np.float32), 2, d_qkv=d_qkv)
    assert (d_qkv == 1).all()
