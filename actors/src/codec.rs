//! Reading messages that share a subject: one match on the schema id instead of one subject a message.

/// Decodes `$bytes` as the one of the listed messages it is and runs its arm; anything else is logged and dropped, so that a
/// hostile or newer sender cannot stop an actor.
#[macro_export]
macro_rules! dispatch {
    ($message:expr, { $($name:ident($bound:pat) => $body:expr,)+ }) => {{
        use pinion_schemas::wire::Schema as _;
        let message = &$message;
        match pinion_schemas::wire::schema_of(&message.payload) {
            $(Some(id) if id == <$name>::ID => {
                match pinion_schemas::wire::decode::<$name>(&message.payload) {
                    Ok($bound) => $body,
                    Err(error) => tracing::warn!(subject = %message.subject, %error, "message dropped"),
                }
            })+
            other => tracing::warn!(subject = %message.subject, schema = ?other, "unexpected message dropped"),
        }
    }};
}
