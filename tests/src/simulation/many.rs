//! Runs of many seeds on several threads.

use std::num::NonZero;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::{Coverage, Failure, run};

/// Results of the runs of many seeds.
#[derive(Debug)]
pub struct Many {
    /// Coverage of the runs that passed.
    pub coverage: Coverage,
    /// Failures, ordered by seed. When the limit of [`run_many`] is reached, runs that are under
    /// way may add some more than the limit.
    pub failures: Vec<Box<Failure>>,
}

/// Runs `seeds` on `threads` threads, until `failures_max` failures are found or `time` has passed.
/// `report` gets the number of seeds that have begun, once in 10,000, and the failures until then.
pub fn run_many(
    seeds: Range<u64>,
    threads: NonZero<usize>,
    failures_max: usize,
    time: Option<Duration>,
    report: impl Fn(u64, usize) + Sync,
) -> Many {
    let deadline = time.and_then(|time| Instant::now().checked_add(time));
    let next = AtomicU64::new(seeds.start);
    let found = Mutex::new(Vec::new());
    let work = || {
        let mut coverage = Coverage::default();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            let is_late = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if seed >= seeds.end || is_late {
                return coverage;
            }
            let begun = seed - seeds.start;
            if begun > 0 && begun.is_multiple_of(REPORT_SEEDS) {
                report(begun, found.lock().expect("nothing panics under this lock").len());
            }
            match run(seed) {
                Ok(one) => coverage.add(&one),
                Err(failure) => {
                    let mut found = found.lock().expect("nothing panics under this lock");
                    found.push(failure);
                    if found.len() >= failures_max {
                        next.store(seeds.end, Ordering::Relaxed);
                    }
                }
            }
        }
    };
    let mut coverage = Coverage::default();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads.get()).map(|_| scope.spawn(work)).collect();
        for thread in threads {
            coverage.add(&thread.join().expect("what a run finds is no panic"));
        }
    });
    let mut failures = found.into_inner().expect("nothing panics under this lock");
    failures.sort_by_key(|failure| failure.seed);
    Many { coverage, failures }
}

const REPORT_SEEDS: u64 = 10_000;
