//! Jobs of real processes under random faults: is each touch of a row counted once?

use std::error::Error;

use elasticdl_tests::{JobFixture, Schedules};
use serde_json::{Value, json};

use crate::Arguments;

pub(crate) fn measure(arguments: &Arguments) -> Result<Value, Box<dyn Error>> {
    let schedules = Schedules {
        job: |programs| JobFixture {
            program_options: &["--tables"],
            micros_per_record: 300,
            ..JobFixture::new(programs, 4)
        },
        flags: &[],
        one_loss_at_a_time: false,
        check: |summary, expected| match summary.row_touches {
            Some(touches)
                if (touches.counted, touches.missing, touches.repeated) == (expected, 0, 0)
                    && touches.expected == expected =>
            {
                Ok(())
            }
            touches => Err(format!("touches {touches:?}, not {expected}")),
        },
    };
    let seeds = arguments.first_seed..arguments.first_seed + arguments.schedules;
    Ok(json!({ "schedules": schedules.run(seeds)? }))
}
