"""Build a session: load this rank's layers and connect its stages with the neighbouring ones."""

from __future__ import annotations

from transformers import PreTrainedModel

from acsgd.codecs.identity import DTYPES
from acsgd.dp.exchange.peers import Peers
from acsgd.meter import Meter
from acsgd.optim.loss_scale import max_targets
from acsgd.pp.runtime import Pipeline
from acsgd.pp.stage import Stage
from acsgd.pp.tied_weights import TiedPair
from acsgd.pp.wire.cache_plan import CachePlan
from acsgd.pp.wire.link import Link, LinkFactory
from acsgd.run.job import Job
from acsgd.run.session import Session
from acsgd.shards.layers import meta_model, tied_keys
from acsgd.shards.load import WeightSource, load_layer
from acsgd.topology import Groups


def build_session(job: Job, source: WeightSource, groups: Groups, cache_plan: CachePlan | None = None) -> Session:
    """Load the weights of this rank's stages, and connect them with the neighbouring stages on other ranks.

    cache_plan: size and place of the activation caches; needed if pp.forward is delta.
    """
    forward_meter, backward_meter = Meter(), Meter()
    model = meta_model(job.model.config).train()
    stages = build_stages(job, model, source, groups)
    meters = forward_meter, backward_meter
    factory = LinkFactory(
        groups.pp, job.streams, job.boundary, job.plugins.forward, job.plugins.backward, *meters, cache_plan
    )
    links = _open_links(job, factory)
    tied = _pair_tied(job, model, stages, factory)
    weights = [weight for stage in stages.values() for weight in stage.weights]
    return Session(
        job=job,
        groups=groups,
        model=model,
        stages=stages,
        weights=weights,
        pipeline=Pipeline(
            job.train_actions,
            job.eval_actions,
            stages,
            links,
            tied,
            exact_steps=job.config.pp.exact_steps,
            exact_eval=job.config.pp.exact_eval,
        ),
        optimizer=job.plugins.optimizer.open(weights, job.config.optim),
        forward_meter=forward_meter,
        backward_meter=backward_meter,
    )


def build_stages(job: Job, model: PreTrainedModel, source: WeightSource, groups: Groups) -> dict[int, Stage]:
    """Load the layers of this rank's stages into `model`, one at a time; all others stay on the meta device."""
    config, device = job.config, job.streams.device
    job.model.family.rebuild_buffers(model, device)
    stages, peers = {}, Peers(groups.dp)
    for index in job.stages:
        shards = job.model.layers[slice(*job.specs[index])]
        held = {
            shard: load_layer(
                model, shard, source, device=device, dtype=DTYPES[config.model.dtype], embedding=job.model.layers[0]
            )
            for shard in shards
        }
        weights = [weight for layer in held.values() for weight in layer]
        stages[index] = Stage(
            model,
            job.model.family,
            held,
            job.plugins.mode.open(weights, peers),
            targets=max_targets(config),
            seed=config.data.seed,
            recompute=config.model.recompute == "layers",
            mask_per_sample=config.model.dropout_mask == "sample",
        )
    return stages


def _open_links(job: Job, factory: LinkFactory) -> dict[int, Link]:
    """Open this rank's ends of all boundaries, in the order of boundaries, as the peers do."""
    if job.topology.stages == 1:
        return {}
    links = {}
    for boundary in range(len(job.specs) - 1):
        for stage, other in ((boundary, boundary + 1), (boundary + 1, boundary)):
            if stage in job.stages:
                links[boundary] = factory.open(boundary, peer=job.rank_of(other), downstream=stage == boundary)
    return links


def _pair_tied(job: Job, model: PreTrainedModel, stages: dict[int, Stage], factory: LinkFactory) -> TiedPair | None:
    """Connect the two copies of a tied weight, if this rank holds one and another rank the other."""
    first, last = 0, len(job.specs) - 1
    originals = tied_keys(model).values()
    weight = next(
        (
            weight
            for index, stage in stages.items()
            for weight in stage.weights
            if weight.copy_of is not None or (index == first and weight.key in originals)
        ),
        None,
    )
    if weight is None or job.rank_of(first) == job.rank_of(last):
        return None
    peer = job.rank_of(last if weight.copy_of is None else first)
    return TiedPair(weight, factory, boundary=last, peer=peer)
