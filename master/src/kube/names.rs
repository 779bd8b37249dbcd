//! Names that users give: of objects, namespaces, labels and environment variables.

/// Checks a name that other objects refer to.
///
/// # Errors
/// A message that describes a valid name.
pub fn parse_object_name(text: &str) -> Result<String, String> {
    let fit = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '.');
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    if text.is_empty() || text.len() > 253 || !text.chars().all(fit) {
        return Err("it must be 1 to 253 lower-case letters, digits, `-` and `.`".into());
    }
    if !text.starts_with(inner) || !text.ends_with(inner) {
        return Err("it must start and end with a letter or digit".into());
    }
    Ok(text.into())
}

/// Checks the name of a namespace.
///
/// # Errors
/// A message that describes a valid name.
pub fn parse_namespace(text: &str) -> Result<String, String> {
    match parse_object_name(text) {
        Ok(name) if name.len() <= 63 && !name.contains('.') => Ok(name),
        Ok(_) => Err("it must be at most 63 letters, digits and `-`".into()),
        Err(error) => Err(error),
    }
}

/// Checks the name of a variable.
pub(super) fn check_variable(name: &str) -> Result<(), String> {
    let fit = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
    if name.is_empty() || !name.chars().all(fit) || name.starts_with(|c: char| c.is_ascii_digit()) {
        return Err(format!(
            "`{name}` can't be a variable's name: letters, digits and `_`, no digit first"
        ));
    }
    if name.starts_with(RESERVED) {
        return Err(format!(
            "{name}: names that start with {RESERVED} are set by elasticdl itself"
        ));
    }
    Ok(())
}

/// Checks a key of a label, an annotation, a taint or a resource: a name, optionally with a domain
/// and `/` before it.
pub(super) fn check_label_key(key: &str) -> Result<(), String> {
    let (domain, name) = match key.split_once('/') {
        Some((domain, name)) => (Some(domain), name),
        None => (None, key),
    };
    if let Some(domain) = domain {
        parse_object_name(domain).map_err(|e| format!("the part before `/`: {e}"))?;
    }
    if name.is_empty() {
        return Err("it must not be empty".into());
    }
    check_label_value(name)
}

pub(super) fn check_label_value(value: &str) -> Result<(), String> {
    let inner = |c: char| c.is_ascii_alphanumeric();
    let fit = |c: char| inner(c) || matches!(c, '-' | '_' | '.');
    let ends = value.is_empty() || (value.starts_with(inner) && value.ends_with(inner));
    if value.len() <= 63 && value.chars().all(fit) && ends {
        return Ok(());
    }
    Err(format!(
        "`{value}` must be at most 63 letters, digits, `-`, `_` and `.`, \
         a letter or digit first and last"
    ))
}

/// Start of the names of variables that elasticdl sets.
pub(super) const RESERVED: &str = "ELASTICDL_";
