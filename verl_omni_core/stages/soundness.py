"""What a run that is resumed stands on, looked at before anything starts. Reads little, changes nothing."""

from verl_omni_core.errors import StoreError
from verl_omni_core.identity import digest
from verl_omni_core.settings.run import RunConfig
from verl_omni_core.stages.checkpoint import STAGE as CHECKPOINT
from verl_omni_core.store.artifacts import RunStore
from verl_omni_core.store.ledger import Ledger
from verl_omni_core.store.manifest import ArtifactRef
from verl_omni_core.store.runs import RunFolder, steps_done
from verl_omni_core.training.checkpoint_files import INDEX_FILE


def refuse_unsound(folder: RunFolder, config: RunConfig) -> None:
    """Refuse a run whose ledger has gaps, whose newest steps are damaged, or whose checkpoint is of another network.

    Raises:
        StoreError: the ledger or a committed stage of the newest steps is damaged. ConfigError: the newest readable
            checkpoint cannot be loaded with these settings.
    """
    store, done = RunStore(folder.root), steps_done(folder.root)
    Ledger(folder.root).check_complete(done)
    for step in (done, done + 1):
        for stage in store.stages(step):
            ref = store.find(step, stage)
            # a damaged checkpoint is passed over for the one before it
            if ref is not None and stage != CHECKPOINT:
                store.manifest(ref)
    for step in reversed(store.steps()):
        try:
            ref = store.find(step, CHECKPOINT) if step <= done else None
            if ref is not None:
                _refuse_other_checkpoint(store, ref, folder, config)
                return
        except StoreError:
            continue  # whoever restores from it says so, and takes the one before


def _refuse_other_checkpoint(store: RunStore, ref: ArtifactRef, folder: RunFolder, config: RunConfig) -> None:
    path, manifest = store.path_of(ref, INDEX_FILE), store.manifest(ref)
    settings = digest(config.model_dump(mode="json"))
    if manifest.run_id == folder.run_id and manifest.producer.get("config_digest") == settings:
        return  # this run wrote it with these very settings
    from verl_omni_core.training.outline import refuse_other_network  # late: it loads the training libraries

    refuse_other_network(path.parent, config)
