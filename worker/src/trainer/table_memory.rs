//! How much memory the rows of tables may take on a worker.

use std::cmp::Reverse;

use elasticdl_tables::{OwnedSize, Table};

use crate::cgroup;

/// The most memory of all tables, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TableMemory {
    /// Any.
    Any,
    /// A part of the memory limit of the workers of this host together.
    OfCgroup(u64),
    /// That of the option, for each worker.
    Given(u64),
}

impl TableMemory {
    /// `option`: `--table-memory`.
    pub(super) fn new(option: Option<u64>) -> Self {
        let given = option.map(Self::Given);
        let of_cgroup = || cgroup::memory_limit().map(|limit| Self::OfCgroup(limit / 4 * 3));
        given.or_else(of_cgroup).unwrap_or(Self::Any)
    }

    /// The limit as it is now: that of a cgroup may have been raised, as by a resize of its pod.
    pub(super) fn read_again(self) -> Self {
        if let Self::OfCgroup(_) = self { Self::new(None) } else { self }
    }

    /// Says that a worker is over its limit, if it is. `workers`: those of this host, which have
    /// about as many rows each.
    pub(super) fn excess(self, bytes: u64, workers: u64) -> Option<String> {
        match self {
            Self::Given(most) if bytes > most => {
                Some(format!("{} on this worker, and --table-memory is {}", mib(bytes), mib(most)))
            }
            Self::OfCgroup(most) if bytes > most / workers => Some(format!(
                "{} on this worker, of {workers} on this host, and they have {} together, three \
                 quarters of the memory limit of their cgroup (without --table-memory)",
                mib(bytes),
                mib(most)
            )),
            _ => None,
        }
    }
}

/// Names the largest of these tables, for an error. `sizes`: what this worker holds of each.
pub(super) fn largest(specs: &[Table], sizes: Vec<OwnedSize>) -> String {
    let mut tables: Vec<_> = specs.iter().zip(sizes).collect();
    tables.sort_by_key(|(_, size)| Reverse(size.bytes));
    let of_table = |(table, size): &(&Table, OwnedSize)| {
        format!("{:?} {} rows in {}", table.name, size.rows, mib(size.bytes as u64))
    };
    let largest: Vec<String> = tables.iter().take(NAMED_TABLES).map(of_table).collect();
    largest.join(", ")
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// Number of tables that an error names, the largest first.
const NAMED_TABLES: usize = 3;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workers_of_a_host_share_the_limit_of_their_cgroup_and_the_option_is_for_each() {
        const MIB: u64 = 1 << 20;
        let of_cgroup = |bytes, workers| TableMemory::OfCgroup(12 * MIB).excess(bytes, workers);
        assert_eq!((of_cgroup(12 * MIB, 1), of_cgroup(4 * MIB, 3)), (None, None));
        let error = of_cgroup(5 * MIB, 3).unwrap();
        let expected = "5.0 MiB on this worker, of 3 on this host, and they have 12.0 MiB together";
        assert!(error.starts_with(expected), "{error}");
        let given = |bytes| TableMemory::Given(12 * MIB).excess(bytes, 3);
        let expected = "13.0 MiB on this worker, and --table-memory is 12.0 MiB";
        assert_eq!((given(12 * MIB), given(13 * MIB).as_deref()), (None, Some(expected)));
        assert_eq!(TableMemory::Any.excess(u64::MAX, 1), None);
        assert_eq!(TableMemory::new(Some(7)), TableMemory::Given(7));
    }
}
