//! Names of checkpoints and of their files.

use std::collections::BTreeMap;

use crate::storage::Found;

/// Name of a checkpoint's folder. The order is that in which a run writes checkpoints.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Name {
    pub(super) step: u64,
    /// Generation of the group that wrote it.
    pub(super) generation: u64,
    /// Identifies the run of the job: 8 hexadecimal digits.
    pub(super) run: String,
}

impl Name {
    /// Parses a folder's name; `None` if it is not that of a checkpoint.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut parts = text.strip_prefix(PREFIX)?.split('-');
        let (step, run, generation) = (parts.next()?, parts.next()?, parts.next()?);
        let name = Self {
            step: step.parse().ok()?,
            generation: generation.strip_prefix('g')?.parse().ok()?,
            run: run.to_owned(),
        };
        (parts.next().is_none() && name.to_string() == text).then_some(name)
    }

    /// The checkpoints among `files`, and whether each has a manifest.
    pub(super) fn all(files: &[Found]) -> BTreeMap<Self, bool> {
        let mut names = BTreeMap::new();
        for file in files {
            if let Some((folder, file)) = file.path.split_once('/')
                && let Some(name) = Self::parse(folder)
            {
                *names.entry(name).or_default() |= file == MANIFEST;
            }
        }
        names
    }
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { step, generation, run } = self;
        write!(f, "{PREFIX}{step:012}-{run}-g{generation}")
    }
}

pub(super) fn shard(rank: usize, world_size: usize) -> String {
    format!("shard-{rank:05}-of-{world_size:05}.safetensors")
}

/// Selects the checkpoints to delete when `newest` has become complete: all complete checkpoints of
/// its run except the last `keep`, and older attempts that did not complete. The checkpoint of the
/// best model, at step `best`, is retained. Checkpoints of newer generations are retained too: an
/// evicted rank that completes a checkpoint of its old group must not delete shards that the newer
/// group is still writing. `exclusive`: all checkpoints of other runs are deleted as well.
pub(super) fn to_remove(
    names: &BTreeMap<Name, bool>,
    newest: &Name,
    (keep, exclusive): (usize, bool),
    best: Option<u64>,
) -> Vec<Name> {
    let others = names.keys().filter(|name| exclusive && name.run != newest.run);
    let ours = names.iter().rev().filter(|(name, _)| name.run == newest.run);
    let is_newer = |name: &&Name| name.generation > newest.generation;
    let (complete, incomplete): (Vec<_>, Vec<_>) = ours.partition(|(_, is_complete)| **is_complete);
    let old = complete.into_iter().skip(keep.max(1)).map(|(name, _)| name);
    let old = old.filter(|name| Some(name.step) != best);
    let incomplete = incomplete.into_iter().map(|(name, _)| name).filter(|name| *name < newest);
    let old = old.filter(|name| *name != newest).chain(incomplete).filter(|name| !is_newer(name));
    old.chain(others).cloned().collect()
}

/// Prefix of the names of checkpoints.
pub(super) const PREFIX: &str = "step-";

pub(super) const MANIFEST: &str = "manifest.json";

#[cfg(test)]
mod tests {
    use super::*;

    fn name(step: u64, generation: u64, run: &str) -> Name {
        Name { step, generation, run: run.into() }
    }

    fn file(path: String) -> Found {
        Found { path, bytes: 1 }
    }

    #[test]
    fn names_are_parsed_and_other_folders_ignored() {
        let known = name(200, 3, "7f3a9c21");
        assert_eq!(known.to_string(), "step-000000000200-7f3a9c21-g3");
        assert_eq!(Name::parse(&known.to_string()), Some(known));
        for other in [
            "",
            "step-200-7f3a9c21-g3",
            "step-000000000200-7f3a9c21",
            "step-000000000200-a-g1-b",
            "x",
        ] {
            assert_eq!(Name::parse(other), None, "{other}");
        }
        assert!(name(9, 9, "b") < name(10, 1, "a") && name(9, 8, "b") < name(9, 9, "a"));
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
        let removed = |keep| to_remove(&names, &name(5, 1, "a"), (keep, false), None);
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
        let with_newer = to_remove(&Name::all(&files), &name(5, 1, "a"), (1, false), None);
        assert_eq!(with_newer, removed(1));
        let with_others = to_remove(&names, &name(5, 1, "a"), (9, true), None);
        assert_eq!(
            with_others,
            [name(3, 1, "a"), name(1, 1, "b")],
            "of a folder that is this job's own"
        );
        let but_the_best = to_remove(&names, &name(5, 1, "a"), (1, false), Some(2));
        assert_eq!(but_the_best, [name(4, 1, "a"), name(1, 1, "a"), name(3, 1, "a")]);
    }
}
