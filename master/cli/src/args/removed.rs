//! Options and values that were removed or never existed, and their replacements.

use clap::error::{ContextKind, ErrorKind};

/// What to do in place of what `error` is about: a removed option, or a scheduler that has no
/// queues.
pub(crate) fn removed(error: &clap::Error) -> Option<String> {
    let given = error.get(ContextKind::InvalidArg)?.to_string();
    match error.kind() {
        ErrorKind::UnknownArgument => {}
        ErrorKind::InvalidValue if given.starts_with("--scheduler ") => {
            let value = error.get(ContextKind::InvalidValue)?.to_string();
            let instead = match &*value {
                "default" | "default-scheduler" => {
                    "leave it out, and the cluster's scheduler places each pod by itself".into()
                }
                other => format!(
                    "for another scheduler, which places each pod by itself, write \
                     `schedulerName: {other}` in --worker-pod-template FILE"
                ),
            };
            return Some(format!(
                "--scheduler {value}: it must be kueue, native or volcano; {instead}"
            ));
        }
        _ => return None,
    }
    let name = given.strip_prefix("--")?.split('=').next()?;
    instead_of(name).map(|instead| format!("--{name} was removed; {instead}"))
}

/// What to do in place of the removed option `--name`.
pub(crate) fn instead_of(name: &str) -> Option<&'static str> {
    REMOVED.iter().find(|(removed, _)| *removed == name).map(|(_, instead)| *instead)
}

/// What takes the place of an option that shaped all pods.
macro_rules! in_templates {
    ($field:literal) => {
        concat!("write ", $field, " in --worker-pod-template FILE and --master-pod-template FILE")
    };
}

/// Names of removed options, and what to do instead.
const REMOVED: [(&str, &str); 18] = [
    ("active-deadline", "use --deadline, which keeps what was trained"),
    ("annotations", in_templates!("`metadata: {annotations: {KEY: VALUE}}`")),
    ("image-pull-policy", in_templates!("`imagePullPolicy` of the containers")),
    ("labels", in_templates!("`metadata: {labels: {KEY: VALUE}}`")),
    ("launch", "use --worker"),
    ("no-shuffle", "use --shuffle none"),
    ("node-selector", in_templates!("`nodeSelector: {KEY: VALUE}`")),
    ("output", "leave it out: --dry-run prints YAML"),
    ("placement", "write `affinity` or `topologySpreadConstraints` in --worker-pod-template FILE"),
    ("priority-class", in_templates!("`priorityClassName: NAME`")),
    ("priority-ladder", "use --priority-tiers"),
    ("records-per-shard", "leave it out: it had no effect on training"),
    ("run-as-user", in_templates!("`securityContext: {runAsUser: UID}`")),
    ("scheduler-name", in_templates!("`schedulerName: NAME`")),
    ("streams", "use --channels"),
    ("tolerations", in_templates!("`tolerations`")),
    ("ttl", "use --ttl-after-finished"),
    ("worker-priority-class", "write `priorityClassName: NAME` in --worker-pod-template FILE"),
];

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;
    use crate::commands::Cli;

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
            (
                "train --image i --run-as-user 1000 -- a",
                "--run-as-user was removed; write `securityContext: {runAsUser: UID}` in \
                 --worker-pod-template FILE and --master-pod-template FILE",
            ),
        ] {
            assert_eq!(removed(&refused(&format!("elasticdl {line}"))).as_deref(), Some(error));
        }
        for (value, instead) in [
            ("default", "leave it out, and the cluster's scheduler places each pod by itself"),
            ("coscheduling", "write `schedulerName: coscheduling` in --worker-pod-template FILE"),
        ] {
            let error = refused(&format!("elasticdl train --image i --scheduler {value} -- a"));
            let text = removed(&error).unwrap();
            let start = format!("--scheduler {value}: it must be kueue, native or volcano; ");
            assert!(text.starts_with(&start) && text.contains(instead), "{text}");
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
