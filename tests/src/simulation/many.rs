//! Many runs, on several threads.

use std::num::NonZero;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::{Failure, Tally, run};

/// Runs of many seeds.
#[derive(Debug)]
pub struct Many {
    /// What happened in those that passed.
    pub tally: Tally,
    /// Those that failed, by seed; with [`run_many`]'s limit, some more than that on the way when
    /// it is reached.
    pub failures: Vec<Box<Failure>>,
}

/// Runs `seeds` on `threads` threads, until as many failures are found as wanted, or `time` is
/// over.
///
/// # Panics
/// If the simulation itself is broken, in a way that is no finding.
pub fn run_many(
    seeds: Range<u64>,
    threads: NonZero<usize>,
    failures_max: usize,
    time: Option<Duration>,
) -> Many {
    let deadline = time.and_then(|time| Instant::now().checked_add(time));
    let next = AtomicU64::new(seeds.start);
    let found = Mutex::new(Vec::new());
    let work = || {
        let mut tally = Tally::default();
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            let is_late = deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if seed >= seeds.end || is_late {
                return tally;
            }
            match run(seed) {
                Ok(one) => tally.add(&one),
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
    let mut tally = Tally::default();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads.get()).map(|_| scope.spawn(work)).collect();
        for thread in threads {
            tally.add(&thread.join().expect("what a run finds is no panic"));
        }
    });
    let mut failures = found.into_inner().expect("nothing panics under this lock");
    failures.sort_by_key(|failure| failure.seed);
    Many { tally, failures }
}
