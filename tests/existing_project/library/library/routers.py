class Reports:
    """Reports are in a database of their own."""

    def db_for_read(self, model, **hints):
        return "reports" if model._meta.model_name == "report" else None

    db_for_write = db_for_read

    def allow_migrate(self, db, app_label, model_name=None, **hints):
        return (db == "reports") == (model_name == "report")
