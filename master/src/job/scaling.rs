//! Changes of a running job's number of workers, and of its limits.

use serde::{Deserialize, Serialize};

/// What a user changes of the number of workers of a job, and of its limits; `None` stays as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct Scaling {
    /// Workers to keep. `None`: those before, or the limit that they exceed from now on.
    pub num_workers: Option<u32>,
    /// Minimum number of workers.
    pub min_workers: Option<u32>,
    /// Maximum number of workers.
    pub max_workers: Option<u32>,
}

impl Scaling {
    /// Why a job that ends refuses any change.
    pub(crate) const ENDING: &str = "the job is ending: its workers stay as they are";

    /// The values that differ from those in `before`.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        self.with(before, |now, before| now.filter(|_| now != before))
    }

    /// These values, and those of `other` where there are none.
    #[must_use]
    pub fn or(self, other: Self) -> Self {
        self.with(other, Option::or)
    }

    /// These values but those that `other` has, too.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        self.with(other, |value, other| value.filter(|_| other.is_none()))
    }

    fn with(self, other: Self, value: fn(Option<u32>, Option<u32>) -> Option<u32>) -> Self {
        Self {
            num_workers: value(self.num_workers, other.num_workers),
            min_workers: value(self.min_workers, other.min_workers),
            max_workers: value(self.max_workers, other.max_workers),
        }
    }
}

/// Only the number of workers changes.
impl From<u32> for Scaling {
    fn from(num_workers: u32) -> Self {
        Self { num_workers: Some(num_workers), ..Self::default() }
    }
}
