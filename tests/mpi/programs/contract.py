"""The options of hvd.DistributedOptimizer, and the ways in which scripts call it."""

from __future__ import annotations

import copy
import warnings

import horovod.torch as hvd
import torch

import hvd_greco as greco
from hvd_greco import methods

from .registry import check
from .support import (
    FEEDBACK,
    METHODS,
    ROUTES,
    Job,
    Net,
    Oracle,
    World,
    compare,
    draw,
    gradients_of,
    raises,
    run_against_oracle,
)


@check(each=METHODS)
def op_average(world: World, method: str) -> None:
    """case 1, 8: the mean of what the ranks sent, each its own choice; the rest is the residual."""
    run_against_oracle(world, method, op=hvd.Average)


@check(each=METHODS)
def op_sum(world: World, method: str) -> None:
    run_against_oracle(world, method, op=hvd.Sum, factor=world.size)


@check(each=METHODS)
def gradient_predivide(world: World, method: str) -> None:
    run_against_oracle(world, method, op=hvd.Average, gradient_predivide_factor=3.0)


@check(each=ROUTES)
def groups_as_a_number(world: World, method: str) -> None:
    """case 31."""
    run_against_oracle(world, method, groups=2)


@check(each=ROUTES)
def groups_as_lists(world: World, method: str) -> None:
    """case 31: one list, and a parameter that is in none."""
    net = Net(world)
    lists = [[net.get_parameter("first"), net.get_parameter("small")]]
    run_against_oracle(world, method, net=net, groups=lists)


@check(each=ROUTES)
def two_backward_passes(world: World, method: str) -> None:
    """case 21: compressed once a step, on the sum of the passes."""
    run_against_oracle(world, method, passes=lambda step: 2, backward_passes_per_step=2)


@check(each=ROUTES)
def partial_last_window(world: World, method: str) -> None:
    """case 21: the last step has fewer passes than the others."""
    run_against_oracle(
        world,
        method,
        steps=3,
        passes=lambda step: 2 if step == 2 else 3,
        backward_passes_per_step=3,
    )


@check(sizes=(3,), each=ROUTES)
def process_set_of_two(world: World, method: str) -> None:
    """case 31: ranks 0 and 1 train with compression, divided by two; all three do beside it."""
    inside = world.rank in (0, 1)
    pair = Job(
        world,
        method,
        Net(world, prefix=f"{world.name}/pair"),
        compression={"process_set": world.pair},
        process_set=world.pair,
    )
    everyone = Job(world, method, Net(world, prefix=f"{world.name}/all"))
    two, three = Oracle((0, 1), method), Oracle(range(3), method)
    for step in range(4):
        gradients = {rank: gradients_of(rank, step) for rank in range(3)}
        pair.net.backward(gradients[world.rank])
        pair.optimizer.step()
        everyone.net.backward(gradients[world.rank])
        everyone.optimizer.step()
        if inside:
            compare(pair, two, gradients, rank=world.rank)
        else:
            for name, parameter in pair.net.named_parameters():
                assert parameter.grad is not None
                assert torch.equal(parameter.grad, gradients[2][name]), "the outsider's gradient"
        compare(everyone, three, gradients, rank=world.rank)
        pair.optimizer.zero_grad()
        everyone.optimizer.zero_grad()
    world.same(everyone.net.parameters(), "parameters of the job of all ranks")


class Embeddings(torch.nn.Module):
    """Two sparse embeddings of one shape, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one = torch.nn.Embedding(60, 40, sparse=True)
        self.two = torch.nn.Embedding(60, 40, sparse=True)
        self.out = torch.nn.Linear(40, 50)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.one(words) - self.two(words * 7 % 60)).square().mean()


@check(each=("dense copies", "left sparse", "dense copies, two passes"))
def sparse_embeddings(world: World, how: str) -> None:
    """case 30: with density 1 each must train as stock Horovod trains it, layer by layer."""
    as_dense = how != "left sparse"
    passes = 2 if "two passes" in how else 1
    models = []
    for compressed in (True, False):
        torch.manual_seed(5)
        model = Embeddings()
        named = [(f"{world.name}/{n}", p) for n, p in model.named_parameters()]
        compression = greco.TopK(named, density=1.0) if compressed else hvd.Compression.none
        if compressed and as_dense:
            # At density 1 nothing is saved and the plan would be dense all over.
            codec = compression._codecs["topk"]
            assignments = {n: greco.plan.Assignment(codec.name, 1.0) for n, _ in named}
            compression.plan = greco.Plan(assignments, context=compression.plan.context)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.5),
            named_parameters=named,
            compression=compression,
            sparse_as_dense=as_dense,
            backward_passes_per_step=passes,
        )
        models.append(model)
        first = None
        for step in range(6):
            for part in range(passes):
                # The last step has half a window, so that compress runs outside of the hooks.
                if step == 5 and part == 1:
                    continue
                generator = torch.Generator().manual_seed(step * 100 + part * 10 + world.rank)
                loss = model(torch.randint(0, 60, (16,), generator=generator))
                first = loss.item() if first is None else first
                loss.backward()
            optimizer.step()
            world.same(model.parameters(), f"parameters after step {step}")
            optimizer.zero_grad()
        assert loss.item() < first, "the loss did not fall"
    for (name, ours), theirs in zip(
        models[0].named_parameters(), models[1].parameters(), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=f"{name} trained apart")


@check(each=FEEDBACK)
def sparse_embeddings_compressed(world: World, method: str) -> None:
    """case 30: with compression, sent and kept add up for each of two embeddings of one shape."""
    torch.manual_seed(5)
    model = Embeddings()
    named = [(f"{world.name}/{n}", p) for n, p in model.named_parameters()]
    compression = METHODS[method](named)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0),
        named_parameters=named,
        compression=compression,
        sparse_as_dense=True,
        op=hvd.Sum,
    )
    pushed = {name: torch.zeros_like(p) for name, p in named}
    returned = {name: torch.zeros_like(p) for name, p in named}
    for step in range(4):
        generator = torch.Generator().manual_seed(step * 10 + world.rank)
        loss = model(torch.randint(0, 60, (16,), generator=generator))
        for (name, _), gradient in zip(
            named,
            torch.autograd.grad(loss, list(model.parameters()), retain_graph=True),
            strict=True,
        ):
            pushed[name] += gradient.to_dense()
        loss.backward()
        optimizer.step()
        for name, parameter in named:
            assert parameter.grad is not None
            returned[name] += parameter.grad.to_dense()
        optimizer.zero_grad()
    for name, _ in named:
        residual = compression.residual(name)
        kept = torch.zeros_like(pushed[name]) if residual is None else residual
        balance = hvd.allreduce(pushed[name] - kept, op=hvd.Sum, name=f"balance/{name}")
        torch.testing.assert_close(returned[name], balance, rtol=1e-4, atol=1e-5)


@check(each=("skip", "no skip"))
def synchronize_clip_step(world: World, how: str) -> None:
    """case 20: compressed exactly once, whether or not step() synchronizes again."""
    for method in ROUTES:
        net = Net(world, prefix=f"{world.name}/{method}")
        job = Job(world, method, net, lr=0.5)
        oracle = Oracle(range(world.size), method)
        for step in range(3):
            gradients = {rank: gradients_of(rank, step) for rank in range(world.size)}
            net.backward(gradients[world.rank])
            job.optimizer.synchronize()
            compare(job, oracle, gradients, rank=world.rank)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.25)
            before, clipped = copy.deepcopy(dict(net.named_parameters())), net.gradients()
            held = job.residuals()
            if how == "skip":
                with job.optimizer.skip_synchronize():
                    job.optimizer.step()
            else:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)
                    job.optimizer.step()
            for name, gradient in net.gradients().items():
                # The small layer is Horovod's own; it averages N equal numbers again.
                assert (
                    torch.equal(gradient, clipped[name])
                    if name != "small"
                    else torch.allclose(gradient, clipped[name])
                ), f"{method}, {name}: the second synchronize() changed the gradient"
                moved = before[name].detach() - 0.5 * clipped[name]
                torch.testing.assert_close(net.get_parameter(name).detach(), moved)
            for name, residual in job.residuals().items():
                if residual is not None:
                    assert torch.equal(residual, held[name]), f"{method}, {name}: residual changed"
            world.same(net.parameters(), f"{method}: parameters after step {step}")
            job.optimizer.zero_grad()


@check(each=FEEDBACK)
def repeat_with_unlike_threads(world: World, method: str) -> None:
    """case 20: a repeated synchronize() is no error where ranks add up in different orders."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1 + world.rank)
    try:
        shapes = {"first": (300_000,)}
        job = Job(world, lambda n, **o: greco.TopK(n, 0.4, **o), Net(world, shapes))
        half = draw("cancels", shape=(150_000,)) * 1e4
        # Adds up to nothing but rounding.
        job.net.backward({"first": torch.cat([half, -half.flip(0)])})
        job.optimizer.synchronize()
        before = job.net.gradients()["first"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            job.optimizer.step()
        assert torch.equal(job.net.gradients()["first"], before)
    finally:
        torch.set_num_threads(threads)


@check(each=(True, False))
def zero_grad_set_to_none(world: World, to_none: bool) -> None:
    """Gradients that are new tensors in each step, and gradients that are kept and zeroed."""
    for method in ROUTES:
        net = Net(world, prefix=f"{world.name}/{method}")
        job = Job(world, method, net)
        oracle = Oracle(range(world.size), method)
        for step in range(4):
            gradients = {rank: gradients_of(rank, step) for rank in range(world.size)}
            # With kept gradients an unused parameter has a zero one, not None.
            gradients[step % world.size]["second"] = None
            net.backward(gradients[world.rank])
            job.optimizer.step()
            compare(job, oracle, gradients, rank=world.rank)
            net.zero_grad(set_to_none=to_none)
        world.same(net.parameters(), "parameters")


@check(each=("assigned", "copied in place", "mixed"))
def gradients_by_hand(world: World, how: str) -> None:
    """Gradients that no backward pass wrote are compressed like any other."""
    for method in ROUTES:
        net = Net(world, prefix=f"{world.name}/{method}")
        job = Job(world, method, net)
        oracle = Oracle(range(world.size), method)
        for step in range(5):
            gradients = {rank: gradients_of(rank, step) for rank in range(world.size)}
            if how == "mixed" and step % 2 == 0:
                net.backward(gradients[world.rank])
            else:
                for name, parameter in net.named_parameters():
                    gradient = gradients[world.rank][name]
                    assert gradient is not None
                    if how == "assigned" or parameter.grad is None:
                        parameter.grad = gradient.clone()
                    else:
                        parameter.grad.copy_(gradient)
            job.optimizer.step()
            compare(job, oracle, gradients, rank=world.rank)
            if how == "mixed":
                net.zero_grad(set_to_none=False)
        world.same(net.parameters(), "parameters")


@check(each=ROUTES)
def two_models_with_the_same_names(world: World, method: str) -> None:
    jobs = [Job(world, method, Net(world)) for _ in range(2)]
    oracles = [Oracle(range(world.size), method) for _ in jobs]
    for step in range(6):
        which = step % 2 if step < 4 else 1
        gradients = {rank: gradients_of(rank, step) for rank in range(world.size)}
        jobs[which].net.backward(gradients[world.rank])
        jobs[which].optimizer.step()
        compare(jobs[which], oracles[which], gradients, rank=world.rank)
        jobs[which].optimizer.zero_grad()
    for job in jobs:
        world.same(job.net.parameters(), "parameters")


@check(each=ROUTES)
def one_compressor_for_two_optimizers(world: World, method: str) -> None:
    """One model, its parameters in two optimizers that step one after the other."""
    net = Net(world)
    compressor = METHODS[method](net.named())
    halves = (("first", "small"), ("second", "third"))
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD([net.get_parameter(name) for name in half], lr=0.1),
            named_parameters=[(f"{world.name}/{name}", net.get_parameter(name)) for name in half],
            compression=compressor,
        )
        for half in halves
    ]
    oracle = Oracle(range(world.size), method)
    for step in range(4):
        gradients = {rank: gradients_of(rank, step) for rank in range(world.size)}
        # Together, one after the other, and only one of the two.
        turns: list[tuple[int, ...]] = [(0, 1)] if step % 2 == 0 else [(0,), (1,)]
        for turn in turns:
            mine = {name: gradients[world.rank][name] for which in turn for name in halves[which]}
            net.backward(mine)
            for which in turn:
                optimizers[which].step()
        got = net.gradients()
        wanted = oracle.step(gradients, got)
        for name, gradient in got.items():
            tolerance = {"rtol": 2**-7, "atol": 1e-6} if method == "bf16" else {}
            torch.testing.assert_close(gradient, wanted[name], **tolerance, msg=name)
        for optimizer in optimizers:
            optimizer.zero_grad()
    world.same(net.parameters(), "parameters")


@check(sizes=(2,), each=("topk", "dense"))
def adasum_is_refused(world: World, method: str) -> None:
    """case 31: refused, with the reason, before anything is sent."""
    job = Job(world, method, op=hvd.Adasum)
    with raises(greco.UnsupportedError, "Adasum", "hvd.Average", "first"):
        job.net.backward({"first": gradients_of(world.rank, 0)["first"]})
    job.compressor.close()


def _classifier(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(24, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(),
        torch.nn.Linear(64, 10),
    )  # fmt: skip


def _batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = draw("batch", rank, step, shape=(16, 24))
    return inputs, (inputs[:, :10] * 2).argmax(dim=1)


@check(sizes=(2, 3, 4), each=[str(spec) for spec in methods.all_specs()])
def parameters_stay_equal(world: World, spec: str) -> None:
    """Every method of the table, with a stateful optimizer started as Horovod's guide says."""
    model = _classifier(world.rank)
    named = [(f"{world.name}/{n}", p) for n, p in model.named_parameters()]
    hvd.broadcast_parameters(dict(named), root_rank=0)
    compression = methods.build(spec, iter(named))
    # DGC has momentum of its own, and refuses an optimizer that adds another.
    betas = (0.0, 0.999) if spec.startswith("dgc") else (0.9, 0.999)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.01, betas=betas),
        named_parameters=named,
        compression=compression,
    )
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    losses = []
    for step in range(8):
        inputs, labels = _batch(world.rank, step)
        optimizer.zero_grad()
        announced = compression.wire_bytes()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        world.same(model.parameters(), f"parameters after step {step}")
        report = compression.last_report
        assert report is not None
        assert report.sent_bytes == announced, f"step {step}: bytes are not those announced"
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert (report.ratio > 1) == (spec != "dense"), f"{spec} sent 1/{report.ratio:.3f} of dense"
    for layer in report.layers:
        assert layer.codec == "dense" or layer.sent_bytes < layer.dense_bytes


@check()
def learns_with_every_method(world: World) -> None:
    """The loss falls over 40 steps, whatever the method."""
    for spec in ("dense", "bf16", "topk:0.05"):
        model = _classifier(0)
        named = [(f"{world.name}/{spec}/{n}", p) for n, p in model.named_parameters()]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.2),
            named_parameters=named,
            compression=methods.build(spec, named),
        )
        losses = []
        for step in range(40):
            inputs, labels = _batch(world.rank, step)
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert sum(losses[-5:]) < 0.9 * sum(losses[:5]), f"{spec}: {losses[:5]} -> {losses[-5:]}"


@check(each=("another model", "a copy", "a part"))
def parameters_that_are_not_the_models(world: World, which: str) -> None:
    net = Net(world)
    named = {
        "another model": [("weight", torch.nn.Linear(50, 40).weight)],
        "a copy": copy.deepcopy(net).named(),
        "a part": net.named()[:1],
    }[which]
    job = Job(world, lambda _, **options: greco.TopK(named, **options), net)
    with raises(greco.UnknownTensorError, "model.named_parameters()", str(len(named))):
        job.net.backward({"third": gradients_of(world.rank, 0)["third"]})
    job.compressor.close()


@check(each=("topk", "randomk"))
def density_one_is_dense(world: World, method: str) -> None:
    """Bitwise for two ranks (one addition, whatever its order), to rounding for three."""
    nets = [Net(world, prefix=f"{world.name}/{i}") for i in range(2)]

    def whole(named: object, **options: object) -> greco.Compressor:
        compressor = (greco.TopK if method == "topk" else greco.RandomK)(
            named, density=1.0, **options
        )
        # Nothing is saved at density 1, so the plan would be dense: give it to the codec.
        assignments = {n: greco.plan.Assignment(method, 1.0) for n, _ in nets[0].named()}
        compressor.plan = greco.Plan(assignments, context=compressor.plan.context)
        return compressor

    ours = Job(world, whole, nets[0])
    theirs = hvd.DistributedOptimizer(
        torch.optim.SGD(nets[1].parameters(), lr=0.1), named_parameters=nets[1].named()
    )
    for step in range(3):
        for net, optimizer in ((nets[0], ours.optimizer), (nets[1], theirs)):
            net.backward(gradients_of(world.rank, step))
            optimizer.step()
        for name, gradient in nets[0].gradients().items():
            expected = nets[1].gradients()[name]
            if world.size == 2:
                assert torch.equal(gradient, expected), f"{name} differs from dense in step {step}"
            else:
                torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-6)
        ours.optimizer.zero_grad()
        theirs.zero_grad()
    for name, residual in ours.residuals().items():
        assert residual is not None, name
        assert not residual.any(), f"{name}: density 1 left a residual"


@check(each=FEEDBACK)
def conservation(world: World, method: str) -> None:
    """case 8: for op Sum, decoded + sum of new residuals = sum of gradients and old residuals."""
    job = Job(world, method, op=hvd.Sum)
    held = {name: torch.zeros(shape) for name, shape in job.shapes().items()}
    for step in range(6):
        gradients = gradients_of(world.rank, step)
        job.net.backward(gradients)
        job.optimizer.step()
        for name, returned in job.net.gradients().items():
            gradient, residual = gradients[name], job.residuals()[name]
            assert gradient is not None
            if name == "small":
                assert residual is None, "a residual of a layer that is not compressed"
                residual = torch.zeros_like(gradient)
            assert residual is not None
            assert residual.any() or name == "small", f"{name}: nothing was held back"
            given = hvd.allreduce(gradient + held[name], op=hvd.Sum, name=f"given/{name}")
            kept = hvd.allreduce(residual, op=hvd.Sum, name=f"kept/{name}")
            torch.testing.assert_close(returned + kept, given, rtol=1e-5, atol=1e-5, msg=name)
            held[name] = residual
        job.optimizer.zero_grad()


@check()
def optimizer_without_names(world: World) -> None:
    """hvd.DistributedOptimizer makes up names of its own; layers are found all the same."""
    net = Net(world)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), compression=METHODS["topk"](net.named())
    )
    gradients = {rank: gradients_of(rank, 0) for rank in range(world.size)}
    net.backward(gradients[world.rank])
    optimizer.step()
    got = net.gradients()
    for name, wanted in Oracle(range(world.size), "topk").step(gradients, got).items():
        torch.testing.assert_close(got[name], wanted, msg=name)


@check(each=ROUTES)
def load_state_dict_in_mid_step(world: World, method: str) -> None:
    """A step that was begun and dropped by load_state_dict() leaves nothing behind."""
    job = Job(world, method)
    oracle = Oracle(range(world.size), method)
    state = copy.deepcopy(job.optimizer.state_dict())
    for step in range(4):
        if step == 2:
            job.net.backward(gradients_of(world.rank, "dropped"))
            # Horovod's own allreduces have to be over before their names are used again.
            world.meet()
            hvd.allreduce(torch.zeros(1), name="pause")
            job.optimizer.load_state_dict(state)
            job.net.zero_grad()
        gradients = {rank: gradients_of(rank, step) for rank in range(world.size)}
        job.net.backward(gradients[world.rank])
        job.optimizer.step()
        compare(job, oracle, gradients, rank=world.rank)
        job.optimizer.zero_grad()
    world.same(job.net.parameters(), "parameters")
