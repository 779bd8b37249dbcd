//! Options that were removed, and what takes their place.

use clap::error::{ContextKind, ErrorKind};

/// What to do in place of the removed option that `error` is about, if it is about one.
pub(crate) fn removed(error: &clap::Error) -> Option<String> {
    if error.kind() != ErrorKind::UnknownArgument {
        return None;
    }
    let given = error.get(ContextKind::InvalidArg)?.to_string();
    let name = given.strip_prefix("--")?.split('=').next()?;
    instead_of(name).map(|instead| format!("--{name} was removed; {instead}"))
}

/// What to do in place of the removed option `--name`.
pub(crate) fn instead_of(name: &str) -> Option<&'static str> {
    REMOVED.iter().find(|(removed, _)| *removed == name).map(|(_, instead)| *instead)
}

/// Names of removed options, and what to do instead.
const REMOVED: [(&str, &str); 7] = [
    ("launch", "use --worker"),
    ("no-shuffle", "use --shuffle none"),
    ("output", "leave it out: --dry-run prints YAML"),
    ("priority-ladder", "use --priority-tiers"),
    ("records-per-shard", "leave it out: it had no effect on training"),
    ("streams", "use --channels"),
    ("ttl", "use --ttl-after-finished"),
];

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;
    use crate::cli::commands::Cli;

    fn refused(line: &str) -> clap::Error {
        Cli::command().try_get_matches_from(line.split(' ')).expect_err(line)
    }

    #[test]
    fn a_removed_option_is_refused_with_what_takes_its_place() {
        for (line, error) in [
            ("train --local --no-shuffle -- a", "--no-shuffle was removed; use --shuffle none"),
            ("train --streams=4 -- a", "--streams was removed; use --channels"),
            ("train --image i --ttl 1h -- a", "--ttl was removed; use --ttl-after-finished"),
            ("logs j --launch 2", "--launch was removed; use --worker"),
        ] {
            assert_eq!(removed(&refused(&format!("elasticdl {line}"))).as_deref(), Some(error));
        }
        assert_eq!(removed(&refused("elasticdl train --no-such -- a")), None);
        assert_eq!(removed(&refused("elasticdl train --channels x -- a")), None);
    }

    #[test]
    fn no_option_that_train_has_is_called_removed() {
        let mut cli = Cli::command();
        cli.build();
        let train = cli.find_subcommand("train").unwrap();
        for long in train.get_arguments().filter_map(clap::Arg::get_long) {
            assert_eq!(instead_of(long), None, "{long}");
        }
    }
}
