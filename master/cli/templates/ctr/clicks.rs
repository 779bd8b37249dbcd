//! Generated clicks in the shape of Criteo's: 13 numbers and 26 categories, whose ids follow Zipf's
//! law. Record `i` depends on the seed and `i` alone.
//!
//! The label is drawn from a logit, so the best possible AUC is that of the logit itself: see
//! [`Click::logit`].

use std::ops::Range;

use elasticdl::{DataError, Dataset, File, Reader};

/// Columns of numbers.
pub(crate) const DENSE: usize = 13;
/// Columns of categories.
pub(crate) const CATEGORIES: usize = 26;

/// One record.
#[derive(Clone, Debug)]
pub(crate) struct Click {
    /// 1 if the user clicked, else 0.
    pub(crate) label: f32,
    /// Numbers, about -1 to 1.
    pub(crate) dense: [f32; DENSE],
    /// The id in each category.
    pub(crate) ids: [u64; CATEGORIES],
    /// Logit of the probability of a click, if it is known.
    pub(crate) logit: Option<f32>,
}

/// Reads `clicks:FROM..TO`: generated records of these numbers.
#[derive(Debug)]
pub(crate) struct Clicks {
    pub(crate) seed: u64,
    /// Ids of the largest category.
    pub(crate) ids: u64,
}

impl Reader for Clicks {
    type Record = Click;

    fn describe(&mut self, source: &str) -> Result<Dataset, DataError> {
        let Some(range) = parse(source) else {
            let reason = "generated data must be clicks:FROM..TO, two numbers of records";
            return Err(DataError::Other(format!("{source}: {reason}").into()));
        };
        Ok(Dataset::new(vec![File::new(source, range.end - range.start)]))
    }

    fn read(&mut self, file: &File, range: Range<u64>) -> Result<Vec<Click>, DataError> {
        let from = parse(&file.path).map_or(0, |range| range.start);
        Ok(range.map(|record| self.click(from + record)).collect())
    }
}

impl Clicks {
    fn click(&self, record: u64) -> Click {
        let mut random = Random(mix(self.seed ^ mix(record)));
        let dense: [f32; DENSE] = std::array::from_fn(|_| random.uniform() * 2.0 - 1.0);
        let ids: [u64; CATEGORIES] = std::array::from_fn(|column| self.id(column, &mut random));
        let mut logit = -1.0;
        for (column, value) in dense.iter().enumerate() {
            logit += value * (weight(self.seed, column as u64, 0) * 0.4);
        }
        for (column, &id) in ids.iter().enumerate() {
            logit += weight(self.seed, 100 + column as u64, id) * 0.5;
        }
        // Pairs of categories whose ids go well together.
        for pair in [(0, 1), (2, 3), (4, 5)] {
            let factor = |column: usize| weight(self.seed, 200 + column as u64, ids[column]);
            logit += factor(pair.0) * factor(pair.1);
        }
        let probability = 1.0 / (1.0 + (-logit).exp());
        let label = if random.uniform() < probability { 1.0 } else { 0.0 };
        Click { label, dense, ids, logit: Some(logit) }
    }

    /// An id of a category: of the last one `ids` are possible, of the first one a thousand.
    fn id(&self, column: usize, random: &mut Random) -> u64 {
        let most = (self.ids as f64).max(1e3);
        let count = 1e3 * (most / 1e3).powf(column as f64 / (CATEGORIES - 1) as f64);
        // Zipf's law with an exponent of 1.1, by the inverse of its continuous form.
        let exponent: f64 = 1.0 - 1.1;
        let uniform = f64::from(random.uniform());
        let rank = (1.0 + uniform * (count.powf(exponent) - 1.0)).powf(1.0 / exponent);
        rank as u64
    }
}

/// A weight of -1 to 1 that belongs to this id of this column.
fn weight(seed: u64, column: u64, id: u64) -> f32 {
    Random(mix(seed ^ mix(column ^ mix(id)))).uniform() * 2.0 - 1.0
}

/// Whether this is no path to files.
pub(crate) fn are_generated(source: &str) -> bool {
    source.starts_with(SCHEME)
}

fn parse(source: &str) -> Option<Range<u64>> {
    let (from, to) = source.strip_prefix(SCHEME)?.split_once("..")?;
    let range = from.parse().ok()?..to.parse().ok()?;
    (range.start < range.end).then_some(range)
}

const SCHEME: &str = "clicks:";

/// A generator of random numbers (SplitMix64).
struct Random(u64);

impl Random {
    /// Uniform in 0..1.
    fn uniform(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        (mix(self.0) >> 40) as f32 / (1 << 24) as f32
    }
}

fn mix(mut number: u64) -> u64 {
    number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}
