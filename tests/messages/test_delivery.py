"""What a delivery may say of the model that its device makes by itself."""

import pytest
from pydantic import ValidationError

from tests.messages.test_orders import EVALUATION
from wildflower.messages.delivery import Delivery

[ORDER] = EVALUATION.orders


def delivery(own, **changes):
    values = {"run": own.run, "device": ORDER.device, "version": "3-0123456789ab", "file_format": "pt2", "task": {}}
    return Delivery(**values | changes, own=own.model_dump())


def test_the_order_of_a_personal_model_is_of_the_devices_own():
    assert delivery(EVALUATION).own == EVALUATION
    two = EVALUATION.model_copy(update={"orders": [ORDER, ORDER]})
    for own, changes in ((EVALUATION, {"device": ORDER.device + 1}), (EVALUATION, {"run": "another"}), (two, {})):
        with pytest.raises(ValidationError, match="its order is not that of a personal model of this device and run"):
            delivery(own, **changes)
