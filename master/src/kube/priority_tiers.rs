//! Tiers of priority classes by which independent jobs share a cluster. Pure.
//!
//! A job's core, its minimum number of workers, has a higher priority than all further workers of
//! all jobs. Each further worker has a lower priority the more workers its job already has: one
//! job's fifth worker precedes another job's thirtieth. The stock scheduler does the rest: with
//! free capacity every job grows; without, it preempts the workers of the largest jobs first.
//!
//! ```text
//!  workers   1 … min    up to 4   6   8   11   15   20   27   36   48   more
//!  class     core       tier 1    2   3   4    5    6    7    8    9    10
//! ```
//!
//! A job of weight 2 counts half of its workers, so that it grows to twice the size of one of
//! weight 1; the core does not depend on the weight.
//!
//! All classes are below 0, so that services, which have no class, precede them.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The priority classes of a job's workers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PriorityTiers {
    /// Class of the core: the workers up to the job's minimum.
    pub core: String,
    /// Classes of the other workers, the highest first: 1 to 10.
    pub tiers: Vec<String>,
    /// The job's share of the cluster, relative to those of other jobs.
    pub weight: Weight,
}

/// A job's share of the cluster, relative to those of other jobs, in hundredths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Weight(u32);

impl Default for Weight {
    fn default() -> Self {
        Self(HUNDREDTHS)
    }
}

/// As [`parse_weight`] reads it.
impl fmt::Display for Weight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", f64::from(self.0) / f64::from(HUNDREDTHS))
    }
}

/// The user's choice of priority classes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TierChoice {
    /// The classes of `manifests/priorityclasses.yaml`, as far as the cluster has them.
    #[default]
    Auto,
    /// No class by slot.
    Off,
    /// These classes.
    These(PriorityTiers),
}

impl PriorityTiers {
    /// Returns the classes of `manifests/priorityclasses.yaml`.
    #[must_use]
    pub fn shipped() -> Self {
        let tiers = (1..=BANDS.len()).map(|tier| format!("elasticdl-tier-{tier}"));
        Self { core: "elasticdl-core".into(), tiers: tiers.collect(), weight: Weight::default() }
    }

    /// Returns the class of the worker in slot `slot` (from 0) of a job with a minimum of
    /// `min_workers`.
    pub(crate) fn class(&self, slot: u32, min_workers: u32) -> &str {
        if slot < min_workers {
            return &self.core;
        }
        let hundredths = u64::from(slot) * u64::from(HUNDREDTHS);
        let weighted = hundredths / u64::from(self.weight.0.max(1));
        let in_band = |&most: &u32| weighted < u64::from(most);
        let band = BANDS.iter().position(in_band).unwrap_or(BANDS.len() - 1);
        // With fewer tiers than bands, each tier covers several bands.
        self.tiers.get(band * self.tiers.len() / BANDS.len()).unwrap_or(&self.core)
    }

    /// Returns the tiers to use in a cluster that has no class `missing`: the core and the lowest
    /// tier, or `None`. Without a class for the core, tiers are of no use: no other worker could
    /// have a lower priority.
    pub(crate) fn without(&self, missing: &str) -> Option<Self> {
        let last = self.tiers.last().filter(|last| *last != missing)?;
        (self.core != missing && self.tiers.len() > 1)
            .then(|| Self { tiers: vec![last.clone()], ..self.clone() })
    }
}

/// Returns the class that the server reports as missing.
pub(crate) fn missing_class(message: &str) -> Option<&str> {
    message
        .split_once("no PriorityClass with name ")?
        .1
        .split_once(" was found")
        .map(|(name, _)| name)
}

/// Parses `auto`, `off` or `CORE,TIER,TIER`.
///
/// # Errors
/// A message that names the error, with an example of a valid value.
pub fn parse(text: &str) -> Result<TierChoice, String> {
    match text {
        "auto" => return Ok(TierChoice::Auto),
        "off" => return Ok(TierChoice::Off),
        _ => {}
    }
    let wanted = "it must be `auto`, `off`, or a class for the core and 1 to 10 for the others, \
                  the highest first, for example `team-core,team-more,team-most`";
    let classes: Result<Vec<String>, String> = text
        .split(',')
        .map(|name| {
            super::names::parse_object_name(name.trim())
                .map_err(|e| format!("`{name}`: {e}; {wanted}"))
        })
        .collect();
    let classes = classes?;
    let twice = classes.iter().enumerate().find(|(i, name)| classes[..*i].contains(name));
    if let Some((_, name)) = twice {
        return Err(format!("{name} is given twice; {wanted}"));
    }
    match classes.split_first() {
        Some((core, tiers)) if (1..=BANDS.len()).contains(&tiers.len()) => {
            let (core, tiers) = (core.clone(), tiers.to_vec());
            Ok(TierChoice::These(PriorityTiers { core, tiers, weight: Weight::default() }))
        }
        _ => Err(format!("{} classes; {wanted}", classes.len())),
    }
}

/// Parses a weight from 0.1 to 10.
///
/// # Errors
/// A message with the valid values.
pub fn parse_weight(text: &str) -> Result<Weight, String> {
    let weight: Option<f64> = text.parse().ok().filter(|weight| (0.1..=10.0).contains(weight));
    let hundredths = weight.map(|weight| (weight * f64::from(HUNDREDTHS)).round() as u32);
    hundredths.map(Weight).ok_or_else(|| "it must be a number from 0.1 to 10".into())
}

/// The master's class in `manifests/priorityclasses.yaml`.
pub(crate) const MASTER_CLASS: &str = "elasticdl-master";

/// A weight of 1.
const HUNDREDTHS: u32 = 100;

/// Number of workers, of a job of weight 1, up to which each tier reaches; the last one has no
/// limit.
const BANDS: [u32; 10] = [4, 6, 8, 11, 15, 20, 27, 36, 48, 60];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_slot_has_its_class() {
        let tiers = PriorityTiers::shipped();
        let table = [
            // Slots, minimum number of workers, class.
            (0..=1, 2, "elasticdl-core"),
            (2..=3, 2, "elasticdl-tier-1"),
            (4..=5, 2, "elasticdl-tier-2"),
            (6..=7, 2, "elasticdl-tier-3"),
            (8..=10, 2, "elasticdl-tier-4"),
            (11..=14, 2, "elasticdl-tier-5"),
            (15..=19, 2, "elasticdl-tier-6"),
            (20..=26, 2, "elasticdl-tier-7"),
            (27..=35, 2, "elasticdl-tier-8"),
            (36..=47, 2, "elasticdl-tier-9"),
            (48..=1000, 2, "elasticdl-tier-10"),
            // A large core does not raise the class of the further workers.
            (0..=9, 10, "elasticdl-core"),
            (10..=10, 10, "elasticdl-tier-4"),
            (0..=3, 0, "elasticdl-tier-1"),
        ];
        for (slots, min_workers, class) in table {
            for slot in slots {
                assert_eq!(
                    tiers.class(slot, min_workers),
                    class,
                    "{slot} of at least {min_workers}"
                );
            }
        }
    }

    #[test]
    fn a_job_of_twice_the_weight_has_twice_the_workers_in_each_tier() {
        let one = PriorityTiers::shipped();
        let of = |weight| PriorityTiers { weight: parse_weight(weight).unwrap(), ..one.clone() };
        let (two, half) = (of("2"), of("0.5"));
        for slot in 2..200 {
            assert_eq!(two.class(2 * slot, 2), one.class(slot, 2), "{slot}");
            assert_eq!(two.class(2 * slot + 1, 2), one.class(slot, 2), "{slot}");
            assert_eq!(half.class(slot, 2), one.class(2 * slot, 2), "{slot}");
        }
        assert_eq!((two.class(1, 2), half.class(1, 2)), ("elasticdl-core", "elasticdl-core"));
        // The weight survives the fallback to two tiers.
        assert_eq!(two.without("elasticdl-tier-3").unwrap().weight, two.weight);
    }

    #[test]
    fn weights_are_numbers_from_a_tenth_to_10() {
        assert_eq!(parse_weight("1"), Ok(Weight::default()));
        assert_eq!(parse_weight("0.125"), Ok(Weight(13)));
        for bad in ["", "0", "0.09", "10.1", "-1", "NaN", "inf", "1x"] {
            assert!(parse_weight(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn fewer_tiers_cover_several_bands_each() {
        let Ok(TierChoice::These(tiers)) = parse("c, a,b") else { panic!() };
        let classes: Vec<&str> =
            [0, 1, 14, 15, 47, 500].iter().map(|&slot| tiers.class(slot, 1)).collect();
        assert_eq!(classes, ["c", "a", "a", "b", "b", "b"]);
    }

    #[test]
    fn a_missing_class_leaves_two_tiers_or_none() {
        let tiers = PriorityTiers::shipped();
        let two = PriorityTiers { tiers: vec!["elasticdl-tier-10".into()], ..tiers.clone() };
        assert_eq!(tiers.without("elasticdl-tier-3"), Some(two.clone()));
        assert_eq!((two.class(0, 1), two.class(1, 1)), ("elasticdl-core", "elasticdl-tier-10"));
        assert_eq!(tiers.without("elasticdl-core"), None);
        assert_eq!(tiers.without("elasticdl-tier-10"), None);
        assert_eq!(two.without("elasticdl-tier-10"), None);
    }

    #[test]
    fn the_missing_class_is_parsed_from_the_servers_message() {
        let message =
            "pods \"j-w-1\" is forbidden: no PriorityClass with name elasticdl-core was found";
        assert_eq!(missing_class(message), Some("elasticdl-core"));
        assert_eq!(missing_class("pods \"j-w-1\" is forbidden: exceeded quota: q"), None);
    }

    #[test]
    fn choices_are_parsed_and_invalid_ones_are_refused() {
        assert_eq!(parse("auto"), Ok(TierChoice::Auto));
        assert_eq!(parse("off"), Ok(TierChoice::Off));
        for bad in ["", "on", "core", "a,", "a,B", "a,b,a", "a,b,c,d,e,f,g,h,i,j,k,l"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
