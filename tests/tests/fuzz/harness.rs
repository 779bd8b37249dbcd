//! Runs one target on its corpus and on changed inputs.
//!
//! A panic fails the test with the seed and the input. An input that does not end within
//! [`INPUT_TIME_MAX`], or that asks for more than [`ADDRESS_SPACE_BYTES`], ends the process; the
//! input is then in the file that the message names.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// A target of the fuzzers.
pub(crate) struct Target {
    pub(crate) name: &'static str,
    /// Number of changed inputs.
    pub(crate) inputs: u64,
    /// Bytes at the start of an input that two thirds of the changes are limited to.
    pub(crate) head: usize,
}

impl Target {
    /// Runs `accepts` on the files of the target's corpus, each of which it must accept or, by the
    /// file's name, refuse, and on files with random changes.
    pub(crate) fn run(&self, mut accepts: impl FnMut(&[u8]) -> bool) {
        limit_address_space();
        let corpus = self.corpus();
        for (name, data) in &corpus {
            assert_eq!(accepts(data), !name.starts_with("refused"), "{}: {name}", self.name);
        }
        let seeds: Vec<Vec<u8>> = corpus.into_iter().map(|(_, data)| data).collect();
        self.run_changed(&seeds, |data| {
            let _ = accepts(data);
        });
    }

    /// Runs `run` on these inputs with random changes.
    pub(crate) fn run_changed(&self, inputs: &[Vec<u8>], run: impl FnMut(&[u8])) {
        self.run_generated(
            |rng| {
                let mut data = inputs[rng.random_range(0..inputs.len())].clone();
                for _ in 0..rng.random_range(1..4) {
                    change(&mut data, self.head, rng);
                }
                data
            },
            run,
        );
    }

    /// Runs `run` on inputs that `generate` derives from a seed.
    pub(crate) fn run_generated(
        &self,
        generate: impl Fn(&mut ChaCha8Rng) -> Vec<u8>,
        mut run: impl FnMut(&[u8]),
    ) {
        limit_address_space();
        let file = self.input_file();
        let seed_running = AtomicU64::new(0);
        thread::scope(|scope| {
            // Dropped at the end of the scope's closure, also by a panic.
            let (_done, is_done) = channel::<()>();
            let (name, seed_running, at) = (self.name, &seed_running, &file);
            scope.spawn(move || {
                let mut last = u64::MAX;
                while is_done.recv_timeout(INPUT_TIME_MAX) == Err(RecvTimeoutError::Timeout) {
                    let seed = seed_running.load(Ordering::Relaxed);
                    assert_or_abort(seed != last, name, seed, at);
                    last = seed;
                }
            });
            for seed in 0..self.inputs * multiple() {
                seed_running.store(seed, Ordering::Relaxed);
                let data = generate(&mut ChaCha8Rng::seed_from_u64(seed));
                fs::write(&file, &data).unwrap();
                let result = catch_unwind(AssertUnwindSafe(|| run(&data)));
                assert!(result.is_ok(), "{name}, seed {seed}: {}", data.escape_ascii());
            }
        });
    }

    /// The files of the corpus, by name.
    fn corpus(&self) -> Vec<(String, Vec<u8>)> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(self.name);
        let entries = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap());
        let mut files: Vec<_> = entries
            .map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap()))
            .collect();
        files.sort();
        assert!(files.iter().any(|(name, _)| !name.starts_with("refused")), "{folder:?}");
        files
    }

    /// The file that holds the input that is running.
    fn input_file(&self) -> PathBuf {
        Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("fuzz-{}", self.name))
    }
}

/// Ends the process unless `is_alive`: a thread that hangs can't be ended.
#[allow(clippy::print_stderr, reason = "the process ends, and says why")]
fn assert_or_abort(is_alive: bool, name: &str, seed: u64, input: &Path) {
    if !is_alive {
        eprintln!("{name}, seed {seed}: no end; the input is in {}", input.display());
        std::process::abort();
    }
}

/// Makes the allocation of what a few bytes declare fail, whether it would be written to or not.
fn limit_address_space() {
    static LIMITED: Once = Once::new();
    LIMITED.call_once(|| {
        let pages = fs::read_to_string("/proc/self/statm").unwrap();
        let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
        let now = pages * rustix::param::page_size() as u64;
        let limit = Rlimit { current: Some(now + ADDRESS_SPACE_BYTES), ..getrlimit(Resource::As) };
        setrlimit(Resource::As, limit).unwrap();
    });
}

fn multiple() -> u64 {
    std::env::var("ELASTICDL_FUZZ_INPUTS").map_or(1, |text| text.parse().unwrap())
}

/// Applies a random change: a flipped bit, a boundary value, a digit, a piece that is removed,
/// duplicated or moved, or noise.
fn change(data: &mut Vec<u8>, head: usize, rng: &mut ChaCha8Rng) {
    if data.len() < 2 {
        return;
    }
    let most = if rng.random_range(0..3) == 0 { data.len() } else { data.len().min(head) };
    let at = rng.random_range(0..most);
    let end = (at + rng.random_range(1..60)).min(data.len());
    match rng.random_range(0..8) {
        0 => data[at] ^= 1 << rng.random_range(0..8),
        1 => {
            let edge = [0_u32, 1, u32::MAX, i32::MAX as u32, 1 << 24][rng.random_range(0..5)]
                .to_le_bytes();
            let end = (at + 4).min(data.len());
            data[at..end].copy_from_slice(&edge[..end - at]);
        }
        2 => data.truncate(at),
        3 => drop(data.drain(at..end)),
        4 => {
            let piece = data[at..end].to_vec();
            data.splice(at..at, piece);
        }
        5 => replace_number(data, at, rng),
        6 => {
            let piece = data[at..end].to_vec();
            let to = rng.random_range(0..data.len());
            data.splice(to..to, piece);
        }
        _ => data[at..end].iter_mut().for_each(|byte| *byte = rng.random()),
    }
}

/// Replaces the next decimal number by a boundary value.
fn replace_number(data: &mut Vec<u8>, at: usize, rng: &mut ChaCha8Rng) {
    let Some(start) = data[at..].iter().position(u8::is_ascii_digit) else { return };
    let start = at + start;
    let digits = data[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let edges = ["0", "-1", "1e308", "4294967295", "9223372036854775807", "18446744073709551615"];
    let edge = edges[rng.random_range(0..edges.len())];
    data.splice(start..start + digits, edge.bytes());
}

/// Longest time for one input, with a large margin for loaded machines.
const INPUT_TIME_MAX: Duration = Duration::from_secs(60);
/// Address space beyond that at the start, for all tests of this executable together.
const ADDRESS_SPACE_BYTES: u64 = 3 << 30;
