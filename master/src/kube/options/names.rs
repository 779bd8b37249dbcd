//! Names that users give: of objects, namespaces and environment variables.

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

const RESERVED: &str = "ELASTICDL_";
