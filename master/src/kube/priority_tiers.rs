//! The tiers of priority classes by which independent jobs share a cluster. Pure.
//!
//! A job's core, which is as many workers as it can't do without, stands above all further workers
//! of all jobs, and the further a worker is from its job's core, the lower it stands: one job's
//! fifth worker outranks another's thirtieth. The stock scheduler does the rest: with room every
//! job grows, without it the largest jobs give way first.
//!
//! ```text
//!  workers   1 … min    up to 4   6   8   11   15   20   27   36   48   more
//!  class     core       tier 1    2   3   4    5    6    7    8    9    10
//! ```
//!
//! All stand below 0: services, which have no class, outrank them.

use serde::{Deserialize, Serialize};

/// The classes of a job's workers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PriorityTiers {
    /// Of those that the job can't do without.
    pub core: String,
    /// Of the others, the highest first: 1 to 10.
    #[serde(rename = "rungs")]
    pub tiers: Vec<String>,
}

/// What a user wants of priority classes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum TierChoice {
    /// The classes of `manifests/priorityclasses.yaml`, as far as the cluster has them.
    #[default]
    Auto,
    /// No class by place.
    Off,
    /// These.
    These(PriorityTiers),
}

impl PriorityTiers {
    /// The classes of `manifests/priorityclasses.yaml`.
    #[must_use]
    pub fn shipped() -> Self {
        let tiers = (1..=BANDS.len()).map(|tier| format!("elasticdl-tier-{tier}"));
        Self { core: "elasticdl-core".into(), tiers: tiers.collect() }
    }

    /// The class of the worker at place `index`, from 0, of a job that can't do without
    /// `min_workers`.
    #[must_use]
    pub fn class(&self, index: u32, min_workers: u32) -> &str {
        if index < min_workers {
            return &self.core;
        }
        let band = BANDS.iter().position(|&most| index < most).unwrap_or(BANDS.len() - 1);
        // Fewer tiers than bands: each stands for several.
        self.tiers.get(band * self.tiers.len() / BANDS.len()).unwrap_or(&self.core)
    }

    /// What is left of the tiers in a cluster that has no class `missing`: two tiers, of which the
    /// lower is the lowest tier, or nothing. Below a core without a class nobody could stand, so
    /// tiers alone are of no use.
    #[must_use]
    pub fn without(&self, missing: &str) -> Option<Self> {
        let last = self.tiers.last().filter(|last| *last != missing)?;
        (self.core != missing && self.tiers.len() > 1)
            .then(|| Self { core: self.core.clone(), tiers: vec![last.clone()] })
    }
}

/// The class that the server says is missing.
#[must_use]
pub fn missing_class(message: &str) -> Option<&str> {
    message
        .split_once("no PriorityClass with name ")?
        .1
        .split_once(" was found")
        .map(|(name, _)| name)
}

/// Reads `auto`, `off` or `CORE,RUNG,RUNG`.
///
/// # Errors
/// What is wrong, with what would be right.
pub fn parse(text: &str) -> Result<TierChoice, String> {
    match text {
        "auto" => return Ok(TierChoice::Auto),
        "off" => return Ok(TierChoice::Off),
        _ => {}
    }
    let wanted = "it must be `auto`, `off`, or a class for the core and 1 to 10 for the others, the highest first, \
                  for example `team-core,team-more,team-most`";
    let classes: Result<Vec<String>, String> = text
        .split(',')
        .map(|name| {
            super::options::parse_object_name(name.trim())
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
            Ok(TierChoice::These(PriorityTiers { core: core.clone(), tiers: tiers.to_vec() }))
        }
        _ => Err(format!("{} classes; {wanted}", classes.len())),
    }
}

/// The class of masters in `manifests/priorityclasses.yaml`.
pub const MASTER_CLASS: &str = "elasticdl-master";

/// Up to how many workers each tier reaches; the last goes on for ever.
const BANDS: [u32; 10] = [4, 6, 8, 11, 15, 20, 27, 36, 48, 60];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_has_its_class() {
        let tiers = PriorityTiers::shipped();
        let table = [
            // Places, least number of workers, class.
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
            // A large core does not lift what stands above it.
            (0..=9, 10, "elasticdl-core"),
            (10..=10, 10, "elasticdl-tier-4"),
            (0..=3, 0, "elasticdl-tier-1"),
        ];
        for (places, min_workers, class) in table {
            for place in places {
                assert_eq!(
                    tiers.class(place, min_workers),
                    class,
                    "{place} of at least {min_workers}"
                );
            }
        }
    }

    #[test]
    fn fewer_rungs_stand_for_several_bands_each() {
        let Ok(TierChoice::These(tiers)) = parse("c, a,b") else { panic!() };
        let classes: Vec<&str> =
            [0, 1, 14, 15, 47, 500].iter().map(|&place| tiers.class(place, 1)).collect();
        assert_eq!(classes, ["c", "a", "a", "b", "b", "b"]);
    }

    #[test]
    fn a_missing_class_leaves_two_tiers_or_none() {
        let tiers = PriorityTiers::shipped();
        let two = PriorityTiers {
            core: "elasticdl-core".into(),
            tiers: vec!["elasticdl-tier-10".into()],
        };
        assert_eq!(tiers.without("elasticdl-tier-3"), Some(two.clone()));
        assert_eq!((two.class(0, 1), two.class(1, 1)), ("elasticdl-core", "elasticdl-tier-10"));
        assert_eq!(tiers.without("elasticdl-core"), None);
        assert_eq!(tiers.without("elasticdl-tier-10"), None);
        assert_eq!(two.without("elasticdl-tier-10"), None);
    }

    #[test]
    fn the_servers_words_name_the_missing_class() {
        let message =
            "pods \"j-w-1\" is forbidden: no PriorityClass with name elasticdl-core was found";
        assert_eq!(missing_class(message), Some("elasticdl-core"));
        assert_eq!(missing_class("pods \"j-w-1\" is forbidden: exceeded quota: q"), None);
    }

    #[test]
    fn choices_are_read_and_nonsense_is_refused() {
        assert_eq!(parse("auto"), Ok(TierChoice::Auto));
        assert_eq!(parse("off"), Ok(TierChoice::Off));
        for bad in ["", "on", "core", "a,", "a,B", "a,b,a", "a,b,c,d,e,f,g,h,i,j,k,l"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
