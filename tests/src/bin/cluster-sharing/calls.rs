//! How many API calls the masters make, by the API server's audit log.

use std::collections::BTreeMap;

use elasticdl_tests::cluster::{ApiServer, Call, calls};
use k8s_openapi::jiff::Timestamp;

/// API calls of the masters of a namespace.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Calls {
    pub(crate) count: usize,
    /// Per second, from the first one to the last one.
    pub(crate) per_s: f64,
    /// Per second, in the ten seconds with the most calls.
    pub(crate) per_s_10: f64,
    /// Calls in the second with the most calls.
    pub(crate) peak: usize,
    /// Calls by verb and kind of the object.
    pub(crate) kinds: BTreeMap<String, usize>,
}

/// The calls so far of the masters of a namespace.
pub(crate) fn of(namespace: &str) -> Calls {
    let all = calls(&ApiServer::new().audit());
    count(&all.into_iter().filter(|call| call.home == namespace).collect::<Vec<_>>())
}

fn count(calls: &[Call]) -> Calls {
    let time = |call: &Call| call.at.parse::<Timestamp>().ok().map(Timestamp::as_millisecond);
    let mut times: Vec<i64> = calls.iter().filter_map(time).collect();
    times.sort_unstable();
    let (Some(first), Some(last)) = (times.first(), times.last()) else { return Calls::default() };
    let seconds = (last - first) as f64 / 1000.0;
    let mut kinds: BTreeMap<String, usize> = BTreeMap::new();
    for call in calls {
        *kinds.entry(format!("{} {}", call.verb, call.resource)).or_default() += 1;
    }
    Calls {
        count: times.len(),
        per_s: times.len() as f64 / seconds.max(1.0),
        per_s_10: most_within(&times, 10_000) as f64 / 10.0,
        peak: most_within(&times, 1000),
        kinds,
    }
}

/// The most of these times, in order, that lie within so many milliseconds.
fn most_within(times: &[i64], ms: i64) -> usize {
    let within =
        |(begin, &first): (usize, &i64)| times[begin..].partition_point(|&time| time < first + ms);
    times.iter().enumerate().map(within).max().unwrap_or_default()
}
