import pytest
import torch

from examples.tiny_lm.model import build_model
from examples.tiny_lm.params import Params

SMALL = {"context": 16, "width": 32, "layers": 2, "heads": 4}


def test_default_model_has_about_a_million_parameters():
    params = Params()
    model = build_model(0, context=params.context, width=params.width, layers=params.layers, heads=params.heads)
    assert 0.8e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.3e6


def test_fresh_model_guesses_and_every_parameter_gets_a_gradient():
    model = build_model(0, **SMALL)
    loss = model(torch.randint(256, (4, 17)))
    loss.backward()
    assert loss.item() == pytest.approx(5.545, abs=0.3)  # log(256)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_logits_depend_on_no_later_byte():
    model = build_model(0, **SMALL)
    first = torch.randint(256, (1, 16))
    second = first.clone()
    second[0, 10:] = torch.randint(256, (6,))
    torch.testing.assert_close(model.logits(first)[:, :10], model.logits(second)[:, :10])


def test_weights_come_from_the_seed_alone():
    state = torch.random.get_rng_state()
    models = [build_model(seed, **SMALL).state_dict() for seed in (1, 1, 2)]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    assert not torch.equal(models[0]["embedding.weight"], models[2]["embedding.weight"])


def test_a_few_steps_learn_a_repeated_sequence():
    model = build_model(0, **SMALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = torch.arange(17).repeat(4, 1)
    losses = []
    for _ in range(20):
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_params_have_defaults_and_take_what_is_given():
    assert Params.from_dict({}) == Params()
    assert Params.from_dict({"data": "texts", "batch": 2}).batch == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"widht": 64}, "unknown parameters widht; tiny_lm knows data, batch, context, width"),
        ({"batch": 0}, "'batch' must be a whole number of at least 1, not 0"),
        ({"layers": "two"}, "'layers' must be a whole number of at least 1, not 'two'"),
        ({"heads": True}, "'heads' must be a whole number of at least 1, not True"),
        ({"data": 3}, "'data' must be a path or null, not 3"),
        ({"width": 30, "heads": 4}, r"'width' \(30\) must be a multiple of 'heads' \(4\)"),
    ],
)
def test_wrong_params_are_named(given, message):
    with pytest.raises(ValueError, match=message):
        Params.from_dict(given)
