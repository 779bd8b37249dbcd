//! Which checkpoints a job keeps, and which it deletes.

use std::collections::BTreeMap;

use super::name::Name;

/// The checkpoints that are retained.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Retention {
    /// Number of complete checkpoints of this run.
    pub(crate) keep: usize,
    /// Whether the folder belongs to this job alone: checkpoints of earlier runs are deleted.
    pub(crate) exclusive: bool,
}

impl Retention {
    /// Selects the checkpoints to delete when `newest` has become complete: all complete
    /// checkpoints of its run except the last ones, and older attempts that did not complete. The
    /// checkpoint of the best model, at step `best`, is retained. Checkpoints of newer generations
    /// are retained too: an evicted rank that completes a checkpoint of its old group must not
    /// delete shards that the newer group is still writing. `names`: the checkpoints that are
    /// there, and whether each is complete.
    pub(super) fn to_remove(
        self,
        names: &BTreeMap<Name, bool>,
        newest: &Name,
        best: Option<u64>,
    ) -> Vec<Name> {
        let Self { keep, exclusive } = self;
        let others = names.keys().filter(|name| exclusive && name.run != newest.run);
        let ours = names.iter().rev().filter(|(name, _)| name.run == newest.run);
        let is_newer = |name: &&Name| name.generation > newest.generation;
        let (complete, incomplete): (Vec<_>, Vec<_>) =
            ours.partition(|(_, is_complete)| **is_complete);
        let old = complete.into_iter().skip(keep.max(1)).map(|(name, _)| name);
        let old = old.filter(|name| Some(name.step) != best);
        let incomplete = incomplete.into_iter().map(|(name, _)| name).filter(|name| *name < newest);
        let old =
            old.filter(|name| *name != newest).chain(incomplete).filter(|name| !is_newer(name));
        old.chain(others).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use elasticdl_data::storage::Found;

    use super::super::name::{MANIFEST, shard};
    use super::*;

    fn name(step: u64, generation: u64, run: &str) -> Name {
        Name { step, generation, run: run.into() }
    }

    fn file(path: String) -> Found {
        Found::new(path, 1)
    }

    #[test]
    fn the_newest_checkpoints_are_retained_and_incomplete_ones_deleted() {
        let mut files = vec![file("readme".into()), file("old/manifest.json".into())];
        for (step, run, complete) in [
            (1, "a", true),
            (2, "a", true),
            (3, "a", false),
            (4, "a", true),
            (5, "a", true),
            (6, "a", false),
        ] {
            files.push(file(format!("{}/{}", name(step, 1, run), shard(0, 1))));
            files.extend(complete.then(|| file(format!("{}/{MANIFEST}", name(step, 1, run)))));
        }
        files.push(file(format!("{}/{MANIFEST}", name(1, 1, "b"))));
        let names = Name::all(&files);
        let removed =
            |keep| Retention { keep, exclusive: false }.to_remove(&names, &name(5, 1, "a"), None);
        assert_eq!(removed(2), [name(2, 1, "a"), name(1, 1, "a"), name(3, 1, "a")]);
        assert_eq!(
            removed(1),
            [name(4, 1, "a"), name(2, 1, "a"), name(1, 1, "a"), name(3, 1, "a")]
        );
        assert_eq!(removed(9), [name(3, 1, "a")]);
        // A newer group has rolled back to an earlier step, and an evicted rank completes a later
        // one.
        for part in [shard(0, 2), MANIFEST.into()] {
            files.push(file(format!("{}/{part}", name(1, 2, "a"))));
        }
        files.push(file(format!("{}/{}", name(2, 2, "a"), shard(0, 2))));
        let one = Retention { keep: 1, exclusive: false };
        let with_newer = one.to_remove(&Name::all(&files), &name(5, 1, "a"), None);
        assert_eq!(with_newer, removed(1));
        let with_others =
            Retention { keep: 9, exclusive: true }.to_remove(&names, &name(5, 1, "a"), None);
        assert_eq!(
            with_others,
            [name(3, 1, "a"), name(1, 1, "b")],
            "of a folder that is this job's own"
        );
        let but_the_best = one.to_remove(&names, &name(5, 1, "a"), Some(2));
        assert_eq!(but_the_best, [name(4, 1, "a"), name(1, 1, "a"), name(3, 1, "a")]);
    }
}
