//! Names of checkpoints and of their files.

use std::collections::BTreeMap;

use elasticdl_data::storage::Found;

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

pub(super) fn rows(rank: usize, world_size: usize) -> String {
    format!("rows-{rank:05}-of-{world_size:05}")
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
}
